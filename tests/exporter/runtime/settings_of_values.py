"""What `test_values_read` reads of another module of the package."""

import torch

FACTOR = 0.25


def float64():
    """What verify's fresh process is set up with."""
    torch.set_default_dtype(torch.float64)
