"""Running PythonOp and PythonOpGrad: the context store, the kernels, onnx.reference and stock onnxruntime."""
