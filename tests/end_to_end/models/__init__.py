"""Real models from PyPI packages, exported and run again (see zoo.py)."""
