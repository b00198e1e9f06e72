"""What a project puts into its own tests: pytest examples/test_roundtrip.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter.testing


class Swish(torch.autograd.Function):
    """x * sigmoid(x) that keeps only x."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * s * (1 + x * (1 - s))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return Swish.apply(self.layer(x))


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_the_model_survives_its_file(dynamo):
    exporter.testing.assert_roundtrip(Model(), (torch.randn(3, 6),), dynamo=dynamo)
