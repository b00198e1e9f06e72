"""Factories for the command line, good and bad."""

from __future__ import annotations

import torch
from torch import nn

import exporter


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor, mode="mean"):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.tied = self.linear.weight
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x):
        x = Scale.apply(self.linear(x), 0.1)
        return Scale.apply(x, 2) + x.detach() * self.frozen + self.kept + self.scratch


class Wide(nn.Linear):
    def forward(self, x):
        return Scale.apply(super().forward(x), 2)


class Rounded(nn.Linear):
    """With 8 bits for its weight and for what it takes, as quantisation-aware training leaves it."""

    def forward(self, x):
        x = torch.fake_quantize_per_tensor_affine(x, 0.05, 128, 0, 255)
        return nn.functional.linear(x, torch.fake_quantize_per_tensor_affine(self.weight, 0.01, 0, -128, 127), self.bias)


class Asks(Scale):
    """No standard operators can stand for it."""

    @staticmethod
    def forward(ctx, x, factor, table):
        ctx.factor = factor if x.sum() > -1e9 else 0
        return x * factor


class Local(nn.Module):
    """Hands on an object that has no portable form."""

    table = type("Table", (), {})()

    def forward(self, x):
        return Asks.apply(x, 1, self.table)


class Branches(torch.autograd.Function):
    """What it does depends on a value, which no graph can say."""

    @staticmethod
    def forward(ctx, x):
        return x * 2 if x.sum() > 0 else x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return Branches.apply(Scale.apply(self.linear(x), 0.5))


class Crash(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        raise KeyError("boom in forward")


def pair():
    return Model(), (torch.ones(2, 3),)


def wide():
    return Wide(3, 100), (torch.ones(2, 3),)


def case():
    return exporter.Case(Model(), (torch.ones(2, 3),), dynamic_shapes=({0: "batch"},))


def portable_case():
    return exporter.Case(Model(), (torch.ones(2, 3),), dynamic_shapes=({0: "batch"},), portable=True)


def mixed():
    return Mixed(), (torch.ones(2, 3),)


def local():
    return Local(), (torch.ones(2, 3),)


def crash():
    return Crash(), (torch.ones(2, 3),)


def raises():
    raise RuntimeError("no model today\x1b[31m")


def leaves():
    raise SystemExit(3)


def wrong():
    return 17


def wrong_pair():
    return "model", ()


def triple():
    return Model(), (), ()


def register():
    exporter.register(Local.table, "the table")


NO_FUNCTION = 3


class Scaled(nn.Module):
    def forward(self, x):
        return Scale.apply(x, 0.5)


def scaled_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), Scaled())
    return exporter.Case(model, (torch.randn(4, 3),), targets=(torch.tensor([0, 1, 0, 1]),), loss=nn.functional.cross_entropy)


def trainable_wide():
    batch = torch.randn(4, 3)
    return exporter.Case(Wide(3, 2), (batch,), targets=(torch.tensor([0, 1, 0, 1]),), loss=nn.functional.cross_entropy)


def trainable_mixed():
    return exporter.Case(Mixed(), (torch.randn(4, 3),), targets=(torch.tensor([0, 1, 0, 1]),), loss=nn.functional.cross_entropy)


def trainable():
    torch.manual_seed(0)
    batch = (torch.randn(4, 3),)
    return exporter.Case(
        nn.Linear(3, 2), batch, targets=(torch.tensor([0, 1, 0, 1]),), loss=nn.functional.cross_entropy, dynamic_shapes=({0: "batch"},)
    )


class Chain(nn.Module):
    """Elementwise functions between two products, whose results a backward reads."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 64), nn.Linear(64, 2)

    def forward(self, x):
        return self.second(torch.sigmoid(torch.tanh(self.first(x)).exp()))


def trainable_chain():
    batch = torch.randn(4, 3)
    return exporter.Case(Chain(), (batch,), targets=(torch.tensor([0, 1, 0, 1]),), loss=nn.functional.cross_entropy)


class Linear(nn.Module):
    """Takes four columns."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)


def rounded():
    return Rounded(3, 3).eval(), (torch.randn(2, 3),)
