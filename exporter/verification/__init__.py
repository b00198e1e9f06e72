"""A file against eager PyTorch, in a fresh process: comparison, report, and where they part."""
