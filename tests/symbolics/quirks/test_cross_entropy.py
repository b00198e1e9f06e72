"""Cross entropy in all its forms against eager: torch's own translation drops label_smoothing silently."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import exporter
from tests.support import Calls

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

SHAPES = {"class": (5,), "batch": (4, 5), "image": (2, 5, 3, 2)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("probabilities", [False, True])
def test_equals_eager(shape, probabilities):
    size = SHAPES[shape]
    torch.manual_seed(0)
    x = torch.randn(size, requires_grad=True)
    target = (
        torch.rand(size).softmax(0 if len(size) == 1 else 1)
        if probabilities
        else torch.randint(0, 5, (*size[:1], *size[2:]) if len(size) > 1 else ())
    )
    losses = []
    for reduction, smoothing, weight in itertools.product(("mean", "sum", "none"), (0.0, 0.1), (None, torch.rand(5) + 0.5)):
        if smoothing or probabilities:
            losses.append(
                nn.CrossEntropyLoss(weight, reduction=reduction, label_smoothing=smoothing, ignore_index=-100 if probabilities else 1)
            )

    class All(nn.Module):
        def forward(self, x, target):
            return tuple(loss(x, target) for loss in losses)

    program = exporter.export(All(), (x, target))
    training = exporter.build_gradient_graph(program, wrt=["x"])
    evaluator = exporter.reference_evaluator(training)
    expected = All()(x, target)
    seeds = [torch.randn_like(y) for y in expected]
    names = [value.name for value in training.graph.inputs]
    feeds = dict(zip(names, (value.detach().numpy() for value in (x, target, *seeds)), strict=True))
    *values, gradient = evaluator.run(None, feeds)
    for value, wanted in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, wanted.detach(), rtol=1e-5, atol=1e-6)
    (wanted,) = torch.autograd.grad(expected, x, seeds)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_where_all_is_ignored_the_gradient_is_zero(smoothing, dynamo):
    """The loss is 0 / 0: a batch that has nothing to say leaves the parameters as they are, in eager."""
    x, target = torch.randn(4, 5, requires_grad=True), torch.full((4,), 1)
    loss = nn.CrossEntropyLoss(torch.rand(5) + 0.5, ignore_index=1, label_smoothing=smoothing)
    expected = loss(x, target)
    expected.backward()
    assert (expected.isnan(), x.grad.any()) == (True, False)
    module = exporter.load(exporter.export(Calls(loss), (x.detach(), target), dynamo=dynamo))
    other = x.detach().clone().requires_grad_()
    value = module(other, target)
    value.backward()
    assert value.isnan()
    torch.testing.assert_close(other.grad, x.grad)


OF_EACH = {
    "sum": lambda x, y: functional.cross_entropy(x, y, reduction="none").sum(),
    "behind": lambda x, y: (functional.cross_entropy(x, y, reduction="none") * 0.1).exp().sum(),
    "itself": lambda x, y: functional.cross_entropy(x, y, reduction="none"),
    "weighted": lambda x, y: functional.cross_entropy(x, y, torch.arange(1.0, 6), ignore_index=2, reduction="none").mean(),
    "nll": lambda x, y: functional.nll_loss(x.log_softmax(1), y, torch.arange(1.0, 6), ignore_index=2, reduction="none").square().mean(),
}


@pytest.mark.parametrize("more", [(), (3,)], ids=["rows", "positions"])
@pytest.mark.parametrize("name", OF_EACH)
def test_losses_of_each_label_at_open_sizes(name, more, dynamo):
    """torch's decompositions give them no dimensions, so that a sum of them was none."""
    loss, axes = OF_EACH[name], ({0: "batch"}, {0: "batch"})
    example = torch.randn(6, 5, *more), torch.randint(5, (6, *more))
    module = exporter.load(exporter.export(Calls(loss), example, dynamo=dynamo, dynamic_shapes=(axes,)))
    x, y = torch.randn(9, 5, *more, requires_grad=True), torch.randint(5, (9, *more))
    value, wanted = module(x, y), loss(x, y)
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(torch.autograd.grad(value.sum(), x), torch.autograd.grad(wanted.sum(), x))
