"""Wrongs of onnxruntime."""
