"""The native library: the kernels of our operators for onnxruntime, and the functions of torch that it calls."""
