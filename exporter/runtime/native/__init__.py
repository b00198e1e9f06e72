"""The native library: the kernels of both operators for onnxruntime, and the functions of torch that it calls."""
