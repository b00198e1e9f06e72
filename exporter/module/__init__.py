"""A saved model as a torch.nn.Module, with gradients."""
