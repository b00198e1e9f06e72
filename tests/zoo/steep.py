"""Functions whose backward is not the derivative of their forward: a lost call shows in the gradients."""

from __future__ import annotations

import torch
from torch import nn


class Steep(torch.autograd.Function):
    """Its backward is not the derivative of its forward: a lost call shows in the gradients."""

    @staticmethod
    def forward(ctx, x, k=2.0):
        ctx.k = k
        return torch.round(x) * k

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.k * g, None


class SteepSetup(torch.autograd.Function):
    @staticmethod
    def forward(x, k=2.0):
        return torch.round(x) * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.k = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return 5 * ctx.k * g, None


class Overridden(Steep):
    @classmethod
    def apply(cls, x, k):
        return super().apply(x + 1, k)


class Outer(torch.autograd.Function):
    """Calls another Function inside: that stays inside."""

    @staticmethod
    def forward(ctx, x):
        return Steep.apply(x) + 1

    @staticmethod
    def backward(ctx, g):
        return 7 * g


steep, steep_setup = Steep.apply, SteepSetup.apply


def made_per_call(x):
    return type("Made", (Steep,), {"__module__": __name__}).apply(x)


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


def gradients(model, x):
    y = model(x)
    y.sum().backward()
    return y.detach(), [p.grad for p in model.parameters()]
