"""Gradients at ties, at NaN and where they are infinite, on both exporters: those of eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn, tensor
from torch.nn import functional

import exporter

NAN = float("nan")
X, Y = tensor([1.0, NAN, 3.0, NAN, 2.0, 2.0]), tensor([NAN, 1.0, 3.0, NAN, 2.0, 5.0])
PLACES = tensor([[0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]])
BEFORE, VALUES = tensor([[4.0, 3, 9, 9], [4, 4, 1, 4], [0, 0, 0, 0]]), tensor([[1.0, 3, 3, 2], [4, 4, 1, 4], [0, 0, 0, 0]])
P, T = tensor([0.0, 1.0, 0.5, 0.0, 1.0]), tensor([0.0, 1.0, 0.3, 0.7, 0.2])


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def reduced(how, include_self):
    return lambda x, values: torch.scatter_reduce(x, 1, PLACES, values, how, include_self=include_self)


CASES = {
    "maximum": (torch.maximum, X, Y),
    "minimum": (torch.minimum, X, Y),
    "maximum of a row": (torch.maximum, VALUES, tensor([1.0, 3.0, NAN, 4.0])),
    **{f"scatter_reduce {how} {itself}": (reduced(how, itself), BEFORE, VALUES) for how in ("amax", "amin") for itself in (True, False)},
    "index_reduce": (lambda x, v: torch.index_reduce(x, 1, PLACES[0], v, "amax", include_self=False), BEFORE, VALUES),
    "binary_cross_entropy": (functional.binary_cross_entropy, P, T),
    "binary_cross_entropy none": (lambda p, t: functional.binary_cross_entropy(p, t, reduction="none"), P, T),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_eager(case, dynamo):
    function, *args = CASES[case]
    model = Model(function)
    loaded = exporter.load(exporter.export(model, tuple(args), dynamo=dynamo))
    found = []
    for each in (loaded, model):
        given = [x.clone().requires_grad_() for x in args]
        y = each(*given)
        cotangent = torch.linspace(0.5, 1.5, y.numel()).reshape(y.shape)
        found.append((y, *torch.autograd.grad(y, given, cotangent)))
    torch.testing.assert_close(*found, equal_nan=True)
