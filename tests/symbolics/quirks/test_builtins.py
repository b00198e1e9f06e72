"""Python's max, min and math.pow in a forward that torch.export captures: as in eager mode."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import exporter
from tests.support import Calls


class Compiled(torch.autograd.Function):
    """Its forward works on values, and looks up what Python's own functions are, as a compiler of Python does."""

    @staticmethod
    def forward(ctx, x):
        assert type(max) is type(math.pow) is type(len)
        return torch.from_numpy(np.maximum(x.numpy(), max(0.5, math.pow(2, -2))))

    @staticmethod
    def backward(ctx, g):
        return g


def numbers(x):
    y = x * max(2, 3.5) * min([1, 2]) * max((), default=2) * max(1, 2, 3, key=lambda n: -n)
    return y, torch.arange(3) * math.pow(2, 3)


def tensors(x):
    a, b, c, d = x
    return max(a, 0) + max(0, b) + 2 * min(a, b) + max(a, b, c) + 3 * min(x) + max([a, c]) + math.pow(d, 2) * d


def sizes(x):
    return x * max(x.shape[0], 3, x.shape[1]) * min(x.shape) * math.pow(x.shape[0], -0.5), torch.full((2,), math.pow(x.shape[0], 2))


def compiled(x):
    return Compiled.apply(x * 2) * math.pow(x.shape[0], 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (numbers, [(3,)]),
        (tensors, [torch.tensor([0.0, 0.0, 1.0, 3.0]), torch.tensor([1.0, 1.0, 1.0, 2.0]), torch.tensor([3.0, -1.0, 2.0, 1.0])]),
        (sizes, [(4, 3), (9, 3), (2, 3)]),
        (compiled, [(4, 3), (9, 3)]),
    ],
)
def test_as_in_eager(function, inputs):
    first, *others = (x if isinstance(x, torch.Tensor) else torch.randn(x) for x in inputs)
    rows = {0: torch.export.Dim("rows", min=2, max=50)} if function in (sizes, compiled) else None
    module = exporter.load(exporter.export(Calls(function), (first,), dynamic_shapes={"args": (rows,)}), allow=[Compiled])
    for x in (first, *others):
        one, two = (x.clone().requires_grad_() for _ in range(2))
        expected, found = (tuple(torch.utils._pytree.tree_leaves(f(v))) for f, v in ((function, one), (module, two)))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found[0].sum(), two), torch.autograd.grad(expected[0].sum(), one))
