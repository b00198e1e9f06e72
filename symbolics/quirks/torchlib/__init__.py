"""Wrongs of onnxscript's torchlib, with which torch.onnx.export(dynamo=True) translates operators."""
