"""Wrongs of the tools of ONNX: onnx_ir, and onnxscript's optimizer and rewriter."""
