"""Functions for portable files: each backward is another than the derivative of its forward, so that a lost one shows.

They stand in no test module: pytest rewrites asserts, and one of these asks what an assert does.
"""

from __future__ import annotations

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

__all__ = [
    "AppliesInBackward",
    "AppliesInForward",
    "AppliesItself",
    "AppliesOnce",
    "AppliesUnseen",
    "AsksForNone",
    "Branches",
    "Checks",
    "Constant",
    "Noise",
    "OnceSquare",
    "ReadsGlobal",
    "Rows",
    "SecondAlone",
    "Slope",
    "Square",
    "Surrogate",
]


class Surrogate(Function):
    """A step, with the derivative of a smooth one times 7: no derivative of its forward looks like it."""

    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 7 * g / (1 + (ctx.slope * x) ** 2), None


class Slope(Function):
    """What a backward applies: another one than the derivative of its forward is its own."""

    @staticmethod
    def forward(ctx, x, g):
        ctx.save_for_backward(x, g)
        return 3 * g * x**2

    @staticmethod
    def backward(ctx, g):
        x, before = ctx.saved_tensors
        return 50 * g * before, 3 * g * x**2


class AppliesInBackward(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return Slope.apply(*ctx.saved_tensors, g)


class AppliesItself(Function):
    """The derivative of exp, times 2: the backward's own derivative goes through a call of it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        return 2 * g * AppliesItself.apply(*ctx.saved_tensors)


class AppliesOnce(AppliesInBackward):
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return Slope.apply(*ctx.saved_tensors, g)


class AppliesInForward(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Square.apply(x) + 1

    @staticmethod
    def backward(ctx, g):
        return 5 * g * ctx.saved_tensors[0]


class AppliesUnseen(AppliesInForward):
    """Its backward applies a Function of which no gradient is asked: it runs again what forward ran, and takes a gradient of that."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(Square.apply(again), again, torch.ones_like(g))
        return g * gradient


class Branches(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2 if x.sum() > 0 else x * 3

    @staticmethod
    def backward(ctx, g):
        return g * 5


class Checks(Function):
    @staticmethod
    def forward(ctx, x):
        assert not x.isnan().any(), "not a number"
        return x * 2

    @staticmethod
    def backward(ctx, g):
        if not g.isfinite().all():
            raise ValueError("no finite gradient")
        return g * 5


class Rows(Function):
    """Python code that depends on a size."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        return x / ctx.rows if ctx.rows > 4 else x

    @staticmethod
    def backward(ctx, g):
        return g * ctx.rows


class Square(Function):
    """The backward is of the saved input, so that there is a second derivative; it is not the forward's."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.exp())
        return x**2

    @staticmethod
    def backward(ctx, g):
        x, constant = ctx.saved_tensors  # eager differentiates the saved input, and not what the forward computed
        return g * x**3 * constant


class OnceSquare(Square):
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g * ctx.saved_tensors[0] ** 3


class _Two(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3


class Constant(_Two):
    """A backward that computes nothing, and reads neither of its gradients."""

    @staticmethod
    def backward(ctx, g, h):
        return torch.full((3, 4), 7.0)


class SecondAlone(_Two):
    @staticmethod
    def backward(ctx, g, h):
        return h * 5 + 1


class AsksForNone(_Two):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return _Two.forward(ctx, x)

    @staticmethod
    def backward(ctx, g, h):
        return (10.0 if g is None else g) + (100.0 if h is None else h)


class ReadsGlobal(Function):
    factor = torch.tensor([2.0])

    @staticmethod
    def forward(ctx, x):
        return x * ReadsGlobal.factor

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Noise(Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, g):
        return g * 3
