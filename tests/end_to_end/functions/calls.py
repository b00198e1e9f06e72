"""Rows of how and where apply is called, and what forward is written in."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import exporter
from tests.end_to_end.functions import other_module
from tests.end_to_end.functions.case import case


class Triple(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Nested(Function):
    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            ctx.leaf = x.detach().requires_grad_()
            ctx.y = Triple.apply(ctx.leaf.sin())
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, g):
        return torch.autograd.grad(ctx.y, ctx.leaf, g)[0]


@case()
def nested_apply(m, x):
    return Nested.apply(x * m.weight)


class Shrink(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.01

    @staticmethod
    def backward(ctx, g):
        return g * 1.02


@case()
def hundred_times(m, x):
    x = x * m.weight
    for _ in range(100):
        x = Shrink.apply(x)
    return x


@case()
def two_classes_of_one_name(m, x):
    return Triple.apply(x * m.weight) + other_module.Triple.apply(x)


def make_local():
    class Local(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 3

    return Local


LOCAL = make_local()


@case(register=lambda: exporter.register(LOCAL))
def local_class(m, x):
    return LOCAL.apply(x * m.weight)


def class_of(factor):
    """cvxpylayers, stylegan3: the settings of a call are the class."""

    class PerCall(Function):
        @staticmethod
        def forward(ctx, x):
            return x * factor

        @staticmethod
        def backward(ctx, g):
            return g * factor * 2

    return PerCall


_CACHE = {}


def cached_class_of(factor):
    if factor not in _CACHE:
        _CACHE[factor] = class_of(factor)
    return _CACHE[factor]


def _register_per_call():
    for factor in (2, 5):
        exporter.register(cached_class_of(factor), f"PerCall {factor}")


@case(register=_register_per_call)
def class_made_per_call(m, x):
    return cached_class_of(2).apply(x * m.weight) + cached_class_of(5).apply(x)


early = Triple.apply


@case()
def early_bound_apply(m, x):
    return early(x * m.weight)


class Overridden(Function):
    """apply fills in arguments, as libraries do for keyword arguments."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor * 3, None

    @classmethod
    def apply(cls, x, *, factor=7):
        return super().apply(x, factor)


@case()
def apply_overridden(m, x):
    return Overridden.apply(x * m.weight) + Overridden.apply(x, factor=2)


@case()
def under_no_grad(m, x):
    with torch.no_grad():
        y = Triple.apply(x * m.weight)
    return y * x


@case()
def under_inference_mode(m, x):
    with torch.inference_mode():
        y = Triple.apply(x + 1)
    return y.clone() * x * m.weight


@case()
def under_enable_grad(m, x):
    with torch.no_grad():
        a = x * 2
        with torch.enable_grad():
            y = Triple.apply(x * m.weight)
    return y + a


@case(evaluation=True, state=lambda: {"drop": nn.Dropout(0.5)})
def in_eval_mode(m, x):
    assert not m.training
    return Triple.apply(m.drop(x * m.weight))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x):
        return Triple.apply(x * self.scale)


@case(state=lambda: {"shared": Shared()})
def in_a_shared_submodule(m, x):
    return m.shared(m.shared(x) + m.weight)


@case(applies=1)
def in_cond(m, x):
    h = x * m.weight
    return torch.cond(h.sum() > -1e9, lambda h: Triple.apply(h) + 1, lambda h: h.sin(), (h,))


@case(applies=1)
def in_while_loop(m, x):
    from torch._higher_order_ops import while_loop

    h = (x * m.weight).detach()
    _, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, Triple.apply(y) + 1), (torch.tensor(0), h))
    return y * m.weight


@case()
def under_checkpoint(m, x):
    return checkpoint(lambda h: Triple.apply(h.sin()), x * m.weight, use_reentrant=False)


@case(state=lambda: {"linear": nn.Linear(4, 4)})
def under_reentrant_checkpoint(m, x):
    return checkpoint(lambda h: torch.tanh(m.linear(h)), x * m.weight, use_reentrant=True)


@case(applies=1, state=lambda: {"linear": nn.Linear(4, 4)})
def inside_reentrant_checkpoint(m, x):
    return checkpoint(lambda h: Triple.apply(m.linear(h)), x * m.weight, use_reentrant=True)


@case(applies=1, wrap=lambda model: torch.compile(model, backend="eager"))
def compiled_model(m, x):
    return Triple.apply(x * m.weight) + 1


@case(applies=1, state=lambda: {"inner": torch.compile(Shared(), backend="eager")})
def compiled_submodule(m, x):
    return m.inner(x) * m.weight


class Numpy(Function):
    @staticmethod
    def forward(ctx, x):
        array = x.detach().numpy()
        ctx.array = np.tanh(array)
        return torch.from_numpy(array * 0.5 * (1 + ctx.array))

    @staticmethod
    def backward(ctx, g):
        return torch.from_numpy(g.numpy() * ctx.array)


@case(dynamic=True)
def forward_with_numpy(m, x):
    return Numpy.apply(x * m.weight)


class Ctypes(Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        ctypes.memmove(y.data_ptr(), x.data_ptr(), x.numel() * x.element_size())
        return y * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3


@case(dynamic=True)
def forward_with_ctypes(m, x):
    return Ctypes.apply(x * m.weight)


class Item(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.scale = x.abs().max().item()
        return x / ctx.scale if ctx.scale > 0 else x

    @staticmethod
    def backward(ctx, g):
        return g * ctx.scale


@case(dynamic=True)
def forward_with_item(m, x):
    return Item.apply(x * m.weight)


class Draws(Function):
    @staticmethod
    def forward(ctx, x):
        mask = (torch.rand(x.shape) < 0.5).to(x.dtype)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0] * 3


@case()
def random_numbers(m, x):
    return Draws.apply(x * m.weight)


class Sneaky(Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        x.zero_()
        return y

    @staticmethod
    def backward(ctx, g):
        return g * 3


@case()
def undeclared_in_place_change(m, x):
    return Sneaky.apply(x * m.weight)
