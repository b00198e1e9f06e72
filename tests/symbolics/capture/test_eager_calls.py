"""Functions that ask for values: a capture by torch.export has those of the eager run, and invents none."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import exporter
from symbolics.capture.eager_calls import EagerCalls
from symbolics.errors import ExportError

ALLOW = ["tests.*:*"]


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, step):
        if not bool((step > 0).all()):
            raise ValueError("the step has to be positive")
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.sum().reshape(1) * 0.1


class Solve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        factor = np.linalg.cholesky(a.detach().numpy())  # raises where a is not positive definite
        inverse = torch.from_numpy(np.linalg.inv(factor @ factor.T).astype("float32"))
        ctx.save_for_backward(inverse)
        return inverse @ b

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.saved_tensors[0].T @ grad


class Positive(torch.autograd.Function):
    """Refuses large values, and gives as many as are positive."""

    @staticmethod
    def forward(ctx, x):
        assert x.abs().max().item() < 100
        ctx.shape, ctx.mask = x.shape, torch.from_numpy(x.detach().numpy() > 0)
        return x[ctx.mask]

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros(ctx.shape).masked_scatter(ctx.mask, grad)


class Shift(torch.autograd.Function):
    """Changes its argument into one that it would refuse."""

    @staticmethod
    def forward(ctx, x):
        if x.max().item() > 50:
            raise ValueError("too large")
        ctx.mark_dirty(x.add_(100))
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.l, self.step = way, nn.Linear(4, 4), nn.Parameter(torch.full((1,), 0.25))

    def forward(self, x):
        return self.way(self, x)


def thrice(net, x):
    for _ in range(3):  # three calls on one line
        x = Round.apply(net.l(x), net.step.abs())
    return x


WAYS = {
    "checks": lambda net, x: Round.apply(net.l(x), net.step.abs()),
    "thrice": thrice,
    "matrix": lambda net, x: Solve.apply(x @ x.T + 0.1 * torch.eye(x.shape[0]), net.l(x)),
    "data-dependent": lambda net, x: Positive.apply(net.l(x)),
    "in place": lambda net, x: Shift.apply(net.l(x)) + 1,
    "without gradients": lambda net, x: net.l(x) + Round.apply(x.detach(), net.step.detach()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("open_size", [False, True])
def test_like_eager(way, open_size):
    model, x = Net(WAYS[way]), torch.randn(3, 4)
    program = exporter.export(model, (x,), dynamic_shapes=({0: Dim("n")},) if open_size else None)
    module = exporter.load(program, allow=ALLOW)
    for inputs in (x, torch.randn(3, 4), *([torch.randn(7, 4)] if open_size else [])):
        theirs, ours = model(inputs), module(inputs)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
        model.zero_grad(), module.zero_grad()
        theirs.square().sum().backward(), ours.square().sum().backward()
        torch.testing.assert_close(module.get_parameter("l.weight").grad, model.l.weight.grad, rtol=1e-3, atol=1e-2)


def solver():
    """A class that is made anew for each call, as solvers of optimization problems make them."""

    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.root = torch.from_numpy(np.linalg.cholesky(a.detach().numpy()))
            return ctx.root

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.root

    return Root


def test_a_class_that_is_made_at_each_call():
    model, x = Net(lambda net, x: solver().apply(x @ x.T + 0.1 * torch.eye(3)) @ net.l(x)), torch.randn(3, 4)
    with pytest.warns(exporter.PythonopWarning, match="made inside of a function"):
        program = exporter.export(model, (x,))
    found = exporter.load(program, allow=[solver()])(x)
    torch.testing.assert_close(found, model(x))


def test_without_an_eager_run_the_error_says_so():
    with pytest.raises(ExportError, match=r"(?s)Round.*the step has to be positive.*not known.*eager_check=False"):
        exporter.export(Net(lambda net, x: Round.apply(x, -x.abs() - 1)), (torch.randn(3, 4),), eager_check=False)


def test_a_call_that_eager_does_not_make_is_named():
    def way(net, x):
        return Round.apply(net.l(x), net.step.abs()) if not torch.compiler.is_exporting() else Round.apply(net.l(x)[0], net.step.abs())

    with pytest.raises(ExportError, match="in eager mode the model makes no call of it, with tensors of these sizes"):
        exporter.export(Net(way), (torch.randn(3, 4),))


def test_nothing_is_kept():
    calls, x = EagerCalls(), torch.randn(3, 4)
    seen, step = weakref.ref(x), torch.ones(1)
    calls.called(Round, (x, step), {})(Round.apply(x, step), ("", "here:1"))
    found = calls.like(Round, ("", "here:1"), [x, step])
    assert found is not None and found.values[0].data_ptr() == x.data_ptr()  # not a copy
    assert calls.like(Round, ("", "elsewhere"), [x, step]) is found
    assert calls.like(Round, ("", "here:1"), [x[:2], step]) is None
    found.release()
    del x
    gc.collect()
    assert seen() is None
