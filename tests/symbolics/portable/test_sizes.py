"""Sizes that are open, in the forward and the backward of portable Functions and outside of them: the same at every size."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import exporter
from symbolics.errors import PythonopWarning

#: What a size is made into; each takes the tensor.
NUMBERS = {
    "numel": lambda x: x.numel(),
    "lsq": lambda x: 1.0 / (x.numel() * 7) ** 0.5,
    "math.sqrt": lambda x: 1.0 / math.sqrt(x.numel()),
    "power": lambda x: x.shape[0] ** 0.5,
    "half": lambda x: x.size(0) // 2,
    "max": lambda x: max(x.shape),
    "min": lambda x: min(x.shape[0], 6),
    "len": lambda x: len(x),
    "sym_float": lambda x: torch.sym_float(x.shape[0]),
    "sym_sqrt": lambda x: torch.sym_sqrt(x.shape[0]),
    "rank": lambda x: x.dim() * x.element_size(),
}


def function_of(number, where):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, step):
            ctx.save_for_backward(x, step)
            return x * step * (number(x) if where == "forward" else 2)

        @staticmethod
        def backward(ctx, g):
            x, step = ctx.saved_tensors
            scale = number(x) if where == "backward" else 3
            return g * scale, (g * x).sum() * scale

    return Scaled


class Model(torch.nn.Module):
    def __init__(self, number, where):
        super().__init__()
        self.linear, self.step = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.tensor(0.1))
        self.number, self.where, self.function = number, where, function_of(number, where)

    def forward(self, x):
        x = self.linear(x)
        return x * self.step * self.number(x) if self.where == "plain" else self.function.apply(x, self.step)


@pytest.fixture(params=[pytest.param(True, marks=pytest.mark.slow), False], ids=["dynamo", "torchscript"])
def dynamo(request):
    return request.param


def check(model, dynamo, rest=(4,), sizes=(5, 9, 3), second=False):
    """The example has the first of the sizes; with ``second``, second derivatives are compared, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PythonopWarning)
        program = exporter.export(model, (torch.randn(sizes[0], *rest),), portable=True, dynamo=dynamo, dynamic_shapes={"x": {0: "rows"}})
    assert all(call.kind == "function" for call in program.portable)
    loaded = exporter.load(program)
    for rows in sizes:
        ours = torch.randn(rows, *rest, requires_grad=True)
        theirs = ours.detach().clone().requires_grad_()
        y, z = loaded(ours), model(theirs)
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
        loaded.zero_grad()
        model.zero_grad()
        if second:
            y, z = (torch.autograd.grad(out.sin().sum(), x, create_graph=True)[0] for out, x in ((y, ours), (z, theirs)))
        y.sum().backward()
        z.sum().backward()
        for a, b in zip((ours, *loaded.parameters()), (theirs, *model.parameters()), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", NUMBERS)
def test_in_a_portable_function(name, where, dynamo):
    check(Model(NUMBERS[name], where), dynamo)


@pytest.mark.parametrize("name", [name for name in NUMBERS if name not in ("math.sqrt", "max", "min")])
def test_in_a_model(name, dynamo):
    check(Model(NUMBERS[name], "plain"), dynamo)


@pytest.mark.parametrize("number", [lambda x: math.sqrt(x.numel()), lambda x: math.ceil(x.shape[0] / 2)], ids=["sqrt", "ceil"])
def test_a_number_of_a_size_in_a_trace_is_said(number):
    with pytest.warns(PythonopWarning, match="makes a number of the size of the open axis 'rows': the file keeps the example's"):
        exporter.export(Model(number, "plain"), (torch.randn(5, 4),), dynamo=False, dynamic_shapes={"x": {0: "rows"}})


def test_math_sqrt_in_a_model():
    check(Model(NUMBERS["math.sqrt"], "plain"), True)


def test_the_way_out_of_a_number(dynamo):
    model = Model(lambda x: float(x.shape[0]), "backward")
    with pytest.warns(PythonopWarning, match=r"stays a PythonOp.*depends on a size .*: compute with the size itself"):
        exporter.export(model, (torch.randn(5, 4),), portable=True, dynamo=dynamo, dynamic_shapes={"x": {0: "rows"}})


class FixedPoint(torch.autograd.Function):
    """One step of it, from zeros: products of more than two axes have a size made of an open and a fixed one."""

    @staticmethod
    def forward(ctx, u, w):
        z = torch.zeros_like(u)
        z = torch.tanh(z @ w.t() + u)
        ctx.save_for_backward(w, z)
        return z

    @staticmethod
    def backward(ctx, g):
        w, z = ctx.saved_tensors
        du = (g + (g * z) @ w) * z
        return du, du.reshape(-1, w.shape[0]).t() @ z.reshape(-1, w.shape[0])


class Nearest(torch.autograd.Function):
    """The nearest of some vectors, straight through."""

    @staticmethod
    def forward(ctx, x, vectors):
        nearest = (x.unsqueeze(-2) - vectors).square().sum(-1).argmin(-1)
        ctx.save_for_backward(x, vectors[nearest])
        return vectors[nearest], (x - vectors[nearest]).square().mean()

    @staticmethod
    def backward(ctx, g, loss):
        x, found = ctx.saved_tensors
        return g + loss * 2 * (x - found) / x.numel(), None


class Rotated(torch.autograd.Function):
    """Halves of an axis meet constants of that size: it has to be known that it is fixed, which a trace does not say."""

    @staticmethod
    def forward(ctx, x, weight):
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1])
        ctx.save_for_backward(weight)
        one, two = (x @ weight).chunk(2, -1)
        return torch.cat((one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()), -1)

    @staticmethod
    def backward(ctx, g):
        (weight,) = ctx.saved_tensors
        angle = torch.arange(g.shape[1], dtype=g.dtype)[:, None] * torch.tensor([1.0, 0.1])
        one, two = g.chunk(2, -1)
        turned = torch.cat((one * angle.cos() + two * angle.sin(), two * angle.cos() - one * angle.sin()), -1)
        return turned @ weight.t(), None


class Grouped(torch.autograd.Function):
    """A view that takes a fixed axis apart."""

    @staticmethod
    def forward(ctx, x, weight):
        rows, length, features = x.shape
        ctx.save_for_backward(weight)
        return (x @ weight).view(rows, length, 2, features // 2).sum(2)

    @staticmethod
    def backward(ctx, g):
        (weight,) = ctx.saved_tensors
        rows, length, half = g.shape
        return g.unsqueeze(2).expand(rows, length, 2, half).reshape(rows, length, 2 * half) @ weight.t(), None


class OfTwo(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.linear, self.weight = (
            function,
            torch.nn.Linear(4, 4),
            torch.nn.Parameter(torch.randn(6, 4) if function is Nearest else torch.randn(4, 4)),
        )
        self.weight.requires_grad_(function is FixedPoint)

    def forward(self, x):
        found = self.function.apply(self.linear(x), self.weight)
        return found if isinstance(found, torch.Tensor) else found[0] * found[1]


@pytest.mark.parametrize("function", [FixedPoint, Nearest, Rotated, Grouped])
@pytest.mark.parametrize("second", [False, True], ids=["", "second derivative"])
def test_an_open_and_fixed_sizes(function, second, dynamo):
    torch.manual_seed(0)
    check(OfTwo(function), dynamo, (5, 4), (3, 8, 1), second)


class Corner(torch.autograd.Function):
    """A matrix of one row less than there are, whose strides torch asks for."""

    @staticmethod
    def forward(ctx, x):
        return x * torch.diag_embed(x[:-1, 0]).sum()

    @staticmethod
    def backward(ctx, g):
        return g + torch.eye(g.shape[0] - 1, dtype=g.dtype).sum()


class Cornered(torch.nn.Module):
    def forward(self, x):
        return Corner.apply(x)


def test_a_square_matrix_of_a_size_less_one(dynamo):
    check(Cornered(), dynamo, sizes=(5, 9, 3))
