"""The library of the accelerator: operators that make onnxruntime's CPU faster."""
