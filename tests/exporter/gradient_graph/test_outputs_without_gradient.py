"""Functions with outputs that have no gradient (marked, of integers, not used, None), and without dimensions: both orders, both exporters, against eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter


class Marked(torch.autograd.Function):
    """A float output beside the result, which is marked; backward reads it."""

    @staticmethod
    def forward(ctx, x):
        m = (x > 0).to(x.dtype) + 0.5
        ctx.save_for_backward(x, m)
        ctx.mark_non_differentiable(m)
        return x.sin() * m, m

    @staticmethod
    def backward(ctx, g, _):
        x, m = ctx.saved_tensors
        return g * x.cos() * m


class MarkedFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        m = (x > 0).to(x.dtype) + 0.5
        ctx.save_for_backward(x, m)
        ctx.mark_non_differentiable(m)
        return m, x**3 * m

    @staticmethod
    def backward(ctx, _, g):
        x, m = ctx.saved_tensors
        return 3 * g * x**2 * m


class MarkedBetween(torch.autograd.Function):
    """Of other shapes than the results."""

    @staticmethod
    def forward(ctx, x):
        m = x.abs().amax(1, keepdim=True)
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(m)
        return x.sin(), m, x**2

    @staticmethod
    def backward(ctx, g, _, h):
        (x,) = ctx.saved_tensors
        return g * x.cos() + 2 * h * x


class MarkedScalar(torch.autograd.Function):
    """What is marked has no dimensions."""

    @staticmethod
    def forward(ctx, x):
        m = x.detach().abs().mean()
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(m)
        return m, x**2

    @staticmethod
    def backward(ctx, _, g):
        (x,) = ctx.saved_tensors
        return 2 * g * x


class Integers(torch.autograd.Function):
    """Not marked, but of a type without gradients, in front; and booleans behind."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.argmax(1), x**3, x > 0

    @staticmethod
    def backward(ctx, _, g, __):
        (x,) = ctx.saved_tensors
        return 3 * g * x**2


class Scalar(torch.autograd.Function):
    """A loss: no dimensions; backward sees the rank of what comes in."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * x).mean()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        assert g.dim() == 0
        return x * 2 / x.numel() * g


class ScalarKept(torch.autograd.Function):
    """Reads its own output, which has no dimensions."""

    @staticmethod
    def forward(ctx, x):
        y = (x * x).sum().sqrt()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        assert g.dim() == 0
        return g * x / y


class Scalars(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * x).mean(), x.sin(), (x**3).sum()

    @staticmethod
    def backward(ctx, g, h, k):
        (x,) = ctx.saved_tensors
        assert g.dim() == k.dim() == 0
        return x * 2 / x.numel() * g + h * x.cos() + 3 * k * x**2


class ScalarIn(torch.autograd.Function):
    """An input without dimensions, and an output without them."""

    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x, s)
        return x * s**2, s.sin()

    @staticmethod
    def backward(ctx, g, h):
        x, s = ctx.saved_tensors
        return g * s**2, 2 * s * (g * x).sum() + h * s.cos()


class Nothing(torch.autograd.Function):
    """Backward gives None for an input that needs a gradient."""

    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x, s)
        return x**2 * s, s * 3

    @staticmethod
    def backward(ctx, g, _):
        x, s = ctx.saved_tensors
        return 2 * g * x * s, None


class Unmaterialized(torch.autograd.Function):
    """Gets None in the places of what is not used, is marked, or has integers."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        m, n = x.sign(), x.argmax(1)
        ctx.mark_non_differentiable(m)
        ctx.save_for_backward(x)
        return m, x**3, n, x.sum()

    @staticmethod
    def backward(ctx, m, g, n, k):
        (x,) = ctx.saved_tensors
        assert m is None and n is None
        found = x * 0 if g is None else 3 * g * x**2
        return found + 0.5 if k is None else found + k * x.cos()


FUNCTIONS = [
    Marked, MarkedFirst, MarkedBetween, MarkedScalar, Integers, Scalar, ScalarKept, Scalars, ScalarIn, Nothing, Unmaterialized,
]  # fmt: skip


class First(nn.Module):
    """The energy.

    Args:
        function: What gives the tensors that it is made of.
        which: The places of those; the others are not used. None: all.
    """

    def __init__(self, function, which=None):
        super().__init__()
        self.function, self.which = function, which
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.s = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x):
        given = (self.linear(x), self.s * 1.5) if self.function in (ScalarIn, Nothing) else (self.linear(x) * self.s,)
        made = self.function.apply(*given)
        made = made if isinstance(made, tuple) else (made,)
        used = [y.to(x.dtype) for i, y in enumerate(made) if self.which is None or i in self.which]
        return sum((y * y + 0.3 * y).sum() for y in used) + (self.linear(x) ** 2).sum()


class Second(First):
    """Its gradients."""

    def forward(self, x):
        energy = super().forward(x)
        return torch.autograd.grad(energy, [self.linear.weight, self.s], create_graph=True, allow_unused=True, materialize_grads=True)


def cases(functions):
    """Function, places of outputs that are used: all of them, and each alone that has a gradient."""
    x, s = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    for function in functions:
        made = function.apply(x, s) if function in (ScalarIn, Nothing) else function.apply(x)
        yield function, None
        if isinstance(made, tuple):
            yield from ((function, (i,)) for i, y in enumerate(made) if y.requires_grad)


def compare(model, x, dynamo, portable, atol=1e-8):
    program = exporter.export(model, (x,), dynamo=dynamo, portable=[f"{__name__}:*"] if portable else False)
    sides = []
    for module in (model, exporter.load(program, allow=() if portable else [f"{__name__}:*"])):
        given, named = x.clone().requires_grad_(), dict(module.named_parameters())
        made = module(given)
        made = list(made) if isinstance(made, tuple) else [made]
        loss = sum((y.sin() + y * y).sum() for y in made if y.requires_grad)
        found = torch.autograd.grad(loss, [given, *(named[name] for name in ("linear.weight", "linear.bias", "s"))], allow_unused=True)
        sides.append([*(y.detach() for y in made), *(torch.zeros(()) if g is None else g for g in found)])
    for mine, eager in zip(sides[1], sides[0], strict=True):
        torch.testing.assert_close(mine, eager.to(mine.dtype).expand(mine.shape) if not eager.any() else eager, rtol=1e-8, atol=atol)


ROWS = [
    *((*case, Second, True, False) for case in cases(FUNCTIONS)),
    *((function, None, Second, False, False) for function in FUNCTIONS),
    *(
        (function, None, First, dynamo, False)
        for dynamo in (True, False)
        for function in (Marked, MarkedBetween, Integers, Scalars, ScalarIn)
    ),
    *((function, None, Second, True, True) for function in (MarkedBetween, MarkedScalar, Scalars, ScalarIn)),
    *((function, None, Second, False, True) for function in (MarkedFirst, Scalar)),
]


@pytest.mark.parametrize(
    ("function", "which", "model", "dynamo", "portable"),
    ROWS,
    ids=lambda given: given.__name__ if isinstance(given, type) else str(given).replace(" ", ""),
)
def test_table(function, which, model, dynamo, portable):
    torch.manual_seed(0)
    compare(model(function, which), torch.randn(3, 4, dtype=torch.float64), dynamo, portable)


@pytest.mark.parametrize("function", [ScalarIn, Nothing, MarkedBetween, Scalars])
def test_large_tensors_beside_small_ones(function):
    """Contexts know large tensors by their edges and shapes, and small ones by themselves."""
    torch.manual_seed(0)
    compare(Second(function), torch.randn(4000, 4, dtype=torch.float64) * 0.1, True, False, atol=1e-6)


class InOneBranch(nn.Module):
    """What a Function without dimensions gives is read in one branch alone: in the other, its gradient is absent."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        y, z = Scalar.apply(self.linear(x)), x.sum()
        return torch.cond(z > 0, lambda y, z: y * y + z, lambda y, z: z * 2.0, (y, z))


def test_a_first_derivative_without_dimensions_that_is_absent_in_a_branch():
    model, x = InOneBranch(), torch.rand(3, 4, dtype=torch.float64)
    module = exporter.load(exporter.export(model, (x.clone().requires_grad_(),)), allow=[f"{__name__}:*"])
    for given in (x, -x):
        found = []
        for side in (model, module):
            leaf = given.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(side(leaf), leaf)
            found.append(gradient)
        torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)
