"""Wrongs of torch: of its functions, of torch.export and of its TorchScript exporter."""
