"""ONNX files that came without PyTorch code: what packages ship, written by many exporters, trained here."""
