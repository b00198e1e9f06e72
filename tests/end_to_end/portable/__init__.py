"""Files whose Functions are ONNX functions, in a process that has neither torch nor any class of them."""
