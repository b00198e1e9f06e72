"""What torch, torchlib and onnxruntime do wrong: one file each, until a release mends it."""
