"""Training libraries and export tools around files of pythonop: an example each, with what it prints beside eager PyTorch."""
