"""float16: numbers that it does not have beside a tensor of it, and counts of elements above its range."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import Function

import exporter
from tests.support import Calls

MANY = 70_000  # more than float16's largest number, 65504


class Shares(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x / 90000

    @staticmethod
    def backward(ctx, g):
        return g * 3e-6


def _in_place(x):
    y = x.clone()
    y *= 1e-5
    y /= 5e-5
    return y.div_(90000.0).mul_(70000)


#: Functions, and a slope at which no gradient is too large or too small for float16.
NUMBERS = {
    "div": (lambda x: x / 90000, 1000.0),
    "mul": (lambda x: x * 1e-8, 1000.0),
    "behind": (lambda x: 1e-6 * x, 1000.0),
    "number by tensor": (lambda x: 1e-6 / (x / 30000), 1000.0),
    "in place": (_in_place, 0.5),
    "functions": (lambda x: torch.multiply(torch.true_divide(x, 70000), torch.tensor(1e-3)), 1000.0),
    "a 0-d tensor": (lambda x: x * torch.tensor(2e-8), 1000.0),
    "0-d tensors of two types": (lambda x: x / 1000 + (x / 1000).mean() * torch.tensor(3.0), 0.5),
    "a large whole number": (lambda x: x * 1e-5 * 70_000, 0.5),
}


def _compared(function, x, dynamo, *, portable=False, slope=1000.0):
    program = exporter.export(Calls(function), (x.detach(),), dynamo=dynamo, portable=portable)
    ours, theirs = (x.detach().clone().requires_grad_() for _ in range(2))
    for given, called in ((ours, exporter.load(program, allow=["tests.*"])), (theirs, function)):
        result = called(given)
        result.sin().backward(torch.full_like(result, slope))
        given.result = result.detach()
    for mine, its in ((ours.result, theirs.result), (ours.grad, theirs.grad)):
        assert mine.dtype == its.dtype
        assert its.isfinite().all()
        assert its.count_nonzero() > 0
        torch.testing.assert_close(mine, its, rtol=5e-3, atol=2e-3 * its.abs().max().item())


SOME = torch.tensor([20000.0, 12000.0, -15000.0, 9000.0], dtype=torch.float16)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_float16_does_not_have(name, dynamo):
    function, slope = NUMBERS[name]
    _compared(function, SOME, dynamo, slope=slope)


@pytest.mark.parametrize("portable", [False, True])
def test_inside_a_Function(portable, dynamo):
    _compared(Shares.apply, SOME, dynamo, portable=portable)


COUNTS = {
    "mean": lambda x: x.mean(),
    "mean along an axis": lambda x: x.mean(-1),
    "a sum by its size": lambda x: x.sum() / x.numel(),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() * 0.5),
    "l1_loss": lambda x: F.l1_loss(x, x.detach() * 0.5),
    "var": lambda x: x.var(),
    "std": lambda x: x.std(-1),
    "pool": lambda x: F.adaptive_avg_pool2d(x.reshape(1, 1, 250, 280), 1),
    "windows": lambda x: F.avg_pool2d(x.reshape(1, 1, 250, 280), (250, 140)),
    "batch_norm": lambda x: F.batch_norm(x.reshape(-1, 1), None, None, training=True)[:3],
}


@pytest.mark.parametrize("name", COUNTS)
def test_more_elements_than_float16_counts(name, dynamo):
    generator = torch.Generator().manual_seed(0)
    _compared(COUNTS[name], torch.randn(1, MANY, generator=generator).half(), dynamo, slope=100.0)


@pytest.mark.parametrize("name", ["mean", "mean along an axis", "mse_loss"])
def test_at_an_open_size(name, dynamo):
    """onnxruntime's CPU computes float16 in float32; the file's own types are what other runtimes have."""
    x = torch.randn(1, 6, generator=torch.Generator().manual_seed(0)).half()
    program = exporter.export(Calls(COUNTS[name]), (x,), dynamo=dynamo, dynamic_shapes=(({1: "n"},),))
    graph = exporter.build_gradient_graph(program).graph
    divisions = [node for node in graph if node.op_type == "Div"]
    assert divisions
    for node in divisions:
        assert "FLOAT16" not in {value.dtype.name for value in node.inputs}, node.name
