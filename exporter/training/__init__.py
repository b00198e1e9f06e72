"""Loss, gradient graph and optimizer as one model that makes a training step."""
