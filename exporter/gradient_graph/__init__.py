"""The gradient of an ONNX model as an ONNX model."""
