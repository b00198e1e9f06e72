"""TARGETs of `pythonop verify`, and models that are wrong in known ways."""

from __future__ import annotations

import torch
from torch import nn

import exporter
from tests.exporter.module import functions as F


def good():
    torch.manual_seed(0)
    return F.Cubic(), (torch.randn(3, 4),)


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * (3 if "exporter.verification.worker" in _main() else 2)


class WrongForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * (2.001 if "exporter.verification.worker" in _main() else 2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


def _main():
    import sys

    return (getattr(sys.modules["__main__"], "__spec__", None) and sys.modules["__main__"].__spec__.name) or ""


class Applies(nn.Module):
    """linear -> the Function -> linear."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.second(torch.tanh(self.function.apply(self.first(x))))


def wrong_forward():
    torch.manual_seed(0)
    return Applies(WrongForward), (torch.randn(3, 4),)


def wrong_backward():
    torch.manual_seed(0)
    return Applies(WrongBackward), (torch.randn(3, 4),)


class Tracks(nn.Module):
    """What a Function gives goes into a buffer, and nowhere else."""

    def __init__(self, function):
        super().__init__()
        self.head, self.function = nn.Linear(4, 2), function
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        with torch.no_grad():
            self.seen.mul_(0.5).add_(self.function(x).mean(0))
            self.calls += 1
        return self.head(x)


def tracks(function):
    torch.manual_seed(0)
    return Tracks(function).train(), (torch.randn(3, 4),)


class Counts(nn.Module):
    """Its state is a number."""

    def __init__(self):
        super().__init__()
        self.head, self.calls = nn.Linear(4, 2), 0

    def forward(self, x):
        self.calls += 1
        return self.head(x) * self.calls


def tenfold(g):
    return g * 10


def tenfold_in_eager(g):
    return None if "exporter.verification.worker" in _main() else g * 10


def hooked(hook):
    model, args = good()
    next(model.parameters()).register_hook(hook)
    return model, args


def make_local():
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 5

        @staticmethod
        def backward(ctx, g):
            return g * 5

    exporter.register(Local, "tests:Local")
    return Local


def local():
    """A class inside a function: the fresh process has to make it too."""
    torch.manual_seed(0)
    return Applies(make_local()), (torch.randn(3, 4),)


def fails():
    raise ValueError("no model today")


class Cache(torch.nn.Module):
    """Keys of earlier calls, and how many they are: room for five calls of three."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(16, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.keys.index_copy_(0, self.count + torch.arange(x.shape[0]), x.detach())
        self.count.add_(x.shape[0])
        return x * self.keys.sum()
