"""Arguments and results that exporters meet raw: unread, without a gradient, the model's own state."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exporter


def _times(ctx, x, *, factor):
    ctx.factor = factor
    return x * factor


class Partial(torch.autograd.Function):
    forward = staticmethod(functools.partial(_times, factor=3.0))

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.factor * g


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.head, self.function = nn.Linear(4, 3), function
        self.register_buffer("k", torch.ones(3))

    def forward(self, *args):
        return self.function(self, *args)


LABELS = torch.tensor([0, 1, 2])
CASES = {
    "unread input": (lambda m, x, mask: m.head(x), (torch.ones(3),)),
    "nothing read": (lambda m, x: torch.ones(2), ()),
    "returned buffer": (lambda m, x: (m.head(x), m.k), ()),
    "returned parameter": (lambda m, x: (m.head(x), m.head.weight), ()),
    "class weights": (lambda m, x, w: F.cross_entropy(m.head(x), LABELS, weight=w), (torch.rand(3),)),
    "pos_weight": (lambda m, x, w: F.binary_cross_entropy_with_logits(m.head(x), torch.ones(3, 3), pos_weight=w), (torch.rand(3),)),
    "forward is a partial": (lambda m, x: Partial.apply(m.head(x)), ()),
}


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_runs_as_in_eager(case, dynamo):
    function, more = CASES[case]
    model, args = Model(function).train(), (torch.randn(3, 4), *more)
    module = exporter.load(exporter.export(model, args, dynamo=dynamo), allow=[Partial]).train()
    found, expected = module(*args), model(*args)
    torch.testing.assert_close(found, expected)
    first, other = (y[0] if isinstance(y, tuple) else y for y in (found, expected))
    if other.requires_grad:
        first.sum().backward()
        other.sum().backward()
        torch.testing.assert_close(module.head.weight.grad, model.head.weight.grad)
