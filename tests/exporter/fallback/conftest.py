from __future__ import annotations

import pytest
import torch


@pytest.fixture
def x():
    torch.manual_seed(3)
    return torch.randn(4, 4)
