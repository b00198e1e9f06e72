"""Functions and models of these tests; importable, as a file names them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from tests.zoo.functions import Cube


class Two(torch.autograd.Function):
    """Two float outputs and an integer one, a float argument."""

    @staticmethod
    def forward(ctx, x, y, factor):
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        index = x.argmax(-1)
        ctx.mark_non_differentiable(index)
        return x * y * factor, torch.sin(x), index

    @staticmethod
    def backward(ctx, g, h, _):
        x, y = ctx.saved_tensors
        return ctx.factor * g * y + h * torch.cos(x), ctx.factor * g * x, None


class Within(torch.autograd.Function):
    """x * x; where a module is set, that module of x, differentiated by its own graph."""

    module = None

    @staticmethod
    def forward(ctx, x):
        module, Within.module = Within.module, None
        try:
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.y = ctx.x * ctx.x if module is None else module(ctx.x)
        finally:
            Within.module = module
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, g):
        return torch.autograd.grad(ctx.y, ctx.x, g)[0]


class Behind(torch.autograd.Function):
    """x * x; where a module is set, its backward takes that module's gradient on the way."""

    module = None

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        module, Behind.module = Behind.module, None
        try:
            if module is not None:
                with torch.enable_grad():
                    inner = x.detach().requires_grad_()
                    torch.autograd.grad(module(inner).sum(), inner)
        finally:
            Behind.module = module
        return 2 * g * x


class CallsBehind(nn.Module):
    def forward(self, x):
        return Behind.apply(torch.sin(Cube.apply(x)))


class CallsWithin(nn.Module):
    def forward(self, x):
        return Within.apply(Cube.apply(x)) + 1


class Cubic(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.second(Cube.apply(self.first(x)))


class Result(NamedTuple):
    value: torch.Tensor
    others: dict


class Structured(nn.Module):
    """Nested result with a constant and None."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x, y, ids):
        a, b, index = Two.apply(self.linear(x), y, 0.5)
        return Result(a, {"b": b, "index": index, "more": [a + ids, None]})


class Tied(nn.Module):
    """Tied, frozen, and a buffer that is no part of state_dict()."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5]), persistent=False)
        self.register_buffer("shift", torch.tensor([0.25]))

    def forward(self, ids):
        return self.head(torch.tanh(self.frozen(self.embed(ids))) * self.scale + self.shift)


class Dropping(nn.Module):
    def __init__(self, p=0.4):
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(6, 64), nn.Dropout(p), nn.Linear(64, 3)

    def forward(self, x):
        return self.second(self.drop(self.first(x)))


class Picky(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if (x < -100).any():
            raise ValueError("picky")
        return x * 2

    @staticmethod
    def backward(ctx, g):
        if (g < -100).any():
            raise ValueError("picky backward")
        return g * 2


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return weight / 2


class Plain(nn.Module):
    """Python's own containers alone, with a constant."""

    def forward(self, x):
        return {"sum": x.sum(-1), "more": [Cube.apply(x), None, ()]}


class RunningUndetached(torch.autograd.Function):
    """Its second result is kept by a module, and no call says that it has no gradient."""

    @staticmethod
    def forward(ctx, x, running):
        new = 0.9 * running + 0.1 * x.abs().mean()
        ctx.save_for_backward(new)
        return x / new, new

    @staticmethod
    def backward(ctx, g, _):
        (new,) = ctx.saved_tensors
        return g / new, None


def running(x, before):
    new = 0.9 * before + 0.1 * x.square().mean()
    return x / new, new
