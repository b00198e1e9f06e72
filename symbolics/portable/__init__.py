"""A Function's own forward and backward as two ONNX functions: traced to ATen, translated, and parted."""
