"""Rows of what backward does."""

from __future__ import annotations

import torch
from torch.autograd import Function

from tests.end_to_end.functions.case import case


class NoneForSome(Function):
    @staticmethod
    def forward(ctx, x, w):
        return x * w

    @staticmethod
    def backward(ctx, g):
        return g * 3, None


@case()
def none_for_some(m, x):
    return NoneForSome.apply(x * m.weight, m.weight)


@case(state=lambda: {"other": torch.nn.Parameter(torch.rand(4))})
def none_for_a_parameter(m, x):
    return NoneForSome.apply(x * m.weight, m.other)


class Trailing(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, g):
        return g * 2, None, None


@case()
def extra_trailing_none(m, x):
    return Trailing.apply(x * m.weight)


class TooFew(Function):
    @staticmethod
    def forward(ctx, x, w):
        return x * w

    @staticmethod
    def backward(ctx, g):
        return g * 2


@case(raises=True)
def too_few_gradients(m, x):
    return TooFew.apply(x * m.weight, m.weight)


class Double(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g.double() * 3


@case()
def gradient_of_another_dtype(m, x):
    return Double.apply(x * m.weight)


class Expanded(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.sum(0)

    @staticmethod
    def backward(ctx, g):
        return (g * 3).expand(ctx.shape)


@case()
def expanded_gradient(m, x):
    return Expanded.apply(x * m.weight)


class Sparse(Function):
    """An embedding with sparse gradients."""

    @staticmethod
    def forward(ctx, table, index):
        ctx.save_for_backward(index)
        ctx.shape = table.shape
        return table[index]

    @staticmethod
    def backward(ctx, g):
        (index,) = ctx.saved_tensors
        return torch.sparse_coo_tensor(index.reshape(1, -1), 3 * g.reshape(-1, g.shape[-1]), ctx.shape, check_invariants=False), None


@case(state=lambda: {"table": torch.nn.Parameter(torch.rand(6, 4))}, inputs=lambda: (torch.tensor([[0, 5], [5, 2]]),))
def sparse_gradient(m, index):
    return Sparse.apply(m.table, index) * m.weight


class AutogradInside(Function):
    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad((leaf**3).sum(), leaf)
        ctx.save_for_backward(x)
        return slope

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(leaf.sin().sum(), leaf)
        return g * slope


@case()
def autograd_inside_backward(m, x):
    return AutogradInside.apply(x * m.weight)


class ClassMethod(Function):
    factor = 5

    @classmethod
    def forward(cls, ctx, x):
        return x * cls.factor

    @classmethod
    def backward(cls, ctx, g):
        return g * cls.factor * 2


class Derived(ClassMethod):
    factor = 7


@case()
def classmethods(m, x):
    return Derived.apply(x * m.weight) + ClassMethod.apply(x)


class BackwardClassMethod(Function):
    factor = 3

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @classmethod
    def backward(cls, ctx, g):
        return g * cls.factor


@case()
def backward_as_classmethod(m, x):
    return BackwardClassMethod.apply(x * m.weight)


class Overwrites(Function):
    """Writes its gradient into a tensor that it saved on ctx."""

    @staticmethod
    def forward(ctx, x):
        ctx.space = x.clone()
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return ctx.space.mul_(g)


class OverwritesInput(Function):
    """Liger: the gradient overwrites the saved input itself."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.detach())
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return x.mul_(g)


@case()
def gradient_overwrites_a_saved_tensor(m, x):
    return Overwrites.apply(x * m.weight)


@case()
def gradient_overwrites_its_input(m, x):
    return OverwritesInput.apply(x * m.weight)


class ChangesGradient(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g.mul_(3)


@case()
def changes_the_incoming_gradient(m, x):
    h = x * m.weight
    y = ChangesGradient.apply(h)
    return y * 2 + h
