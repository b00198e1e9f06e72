"""A guest: onnxruntime's CPU made faster, for training steps and loaded modules. Reached through `exporter.runtime.accelerate` alone."""
