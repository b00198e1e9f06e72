"""What one node means. This package imports nothing: take what you need from its modules."""
