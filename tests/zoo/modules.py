"""Modules that a tracer cannot look into, or that remember, share and answer in unusual ways: each may stay one node."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "Adjoint",
    "Answers",
    "Applies",
    "Chooses",
    "Counts",
    "HalfOfPowers",
    "Holds",
    "Net",
    "Own",
    "OwnGradient",
    "Recomputes",
    "Remembers",
    "Repeats",
    "Routes",
    "RoutesAsTold",
    "Rows",
    "Shares",
    "Solves",
    "Spare",
    "Statistics",
    "Tallies",
    "answers",
    "applied",
    "blend",
    "doubled",
    "keeps",
    "solve",
    "told",
    "trains",
    "twice",
    "within",
]


class Own(torch.autograd.Function):
    """A sine with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return 3 * g


@dataclass
class Setting:
    power: float = 2.0
    kind: torch.dtype = torch.float32
    sizes: tuple[int, ...] = (1, 2)


class Repeats(nn.Module):
    """How often it calls what it holds is a matter of its input's values."""

    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.gain = nn.Parameter(torch.randn(width))
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.setting = Setting()
        self.steps = {"least": 1, "most": [2, None]}
        self.activation = nn.functional.softplus

    def forward(self, x):
        for _ in range(int(np.clip(np.ceil(x.detach().abs().max().item()), self.steps["least"], self.steps["most"][0]))):
            x = self.inner(x) + x
        return self.activation(x * self.gain.to(self.setting.kind)) * self.scale**self.setting.power


class OwnGradient(nn.Module):
    """Calls a Function, which stays inside."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return Own.apply(self.linear(x))


class Answers(nn.Module):
    """Containers go in and come out."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, pair, *, scale=1.0, mask=None):
        y = self.linear(x) * scale + pair[0] * pair[1]["k"]
        return {"y": y * mask, "more": (y.sum(-1), None), "n": 3}


class Shares(nn.Module):
    """One weight under two names, one module under two names."""

    def __init__(self, width=4):
        super().__init__()
        self.a = nn.Linear(width, width, bias=False)
        self.b = nn.Linear(width, width)
        self.b.weight = self.a.weight
        self.c = self.a

    def forward(self, x):
        return self.b(self.a(x).tanh()) + self.c(x)


class Statistics(nn.Module):
    """Running statistics, and a buffer that is replaced."""

    def __init__(self, width=4):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return self.norm(self.linear(x)) + (self.count.item() > 99)


class CountsInPlace(nn.Module):
    """A buffer that is written in place; gives back its argument and a parameter beside a result."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.count += 1
        return x, self.linear.bias, self.linear(x) * self.count.item()


class KeepsGradient(nn.Module):
    """A buffer through which a gradient flows from one call to the next."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        y = self.linear(x) + self.mean
        self.mean = y.mean(0)
        return y


class Silent(nn.Module):
    """Returns nothing."""

    def forward(self, x):
        return None


class Remembers(nn.Module):
    """Keeps what it computed last as an attribute."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.last = None

    def forward(self, x):
        self.last = self.linear(x)
        return self.last * 2


class Rows(nn.Module):
    """Some of its rows, and all of them twice."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        y = self.linear(x)
        kept = [i for i in range(len(y)) if y[i].sum().item() > 0] or [0]
        return y[kept], torch.cat([y, torch.from_numpy(x.detach().numpy())])


class Spare(nn.Module):
    """Has a layer that no input reaches."""

    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.a(x)


class Routes(Spare):
    """Which of its layers it calls is a matter of its input's values."""

    def forward(self, x):
        return self.a(x) if x.sum().item() > 0 else self.b(x)


class Chooses(Spare):
    """Calls its second layer for values that nobody makes up."""

    def forward(self, x):
        return self.b(x) if x.norm() > 1e6 else self.a(x)


def told(what=""):
    """Which way `RoutesAsTold` takes; a test puts another in its place."""
    return what


class RoutesAsTold(Spare):
    """Which of its layers it calls, and whether it takes its second argument, is no matter of values."""

    def forward(self, x, y):
        h = self.b(x) if told() == "layer" else self.a(x)
        return h * y if told() == "argument" else h


class Counts(nn.Module):
    """Its configuration is one number, and its forward takes one."""

    def __init__(self, number=3):
        super().__init__()
        self.number = number

    def forward(self, x, rows: int):
        return x.new_full((rows, self.number), float(x.sum()))


class Holds(nn.Module):
    """Has whatever attribute it is given."""

    def __init__(self, held):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held = held

    def forward(self, x):
        return self.linear(x)


class Net(nn.Module):
    """A module between a layer and what is done with its result."""

    def __init__(self, block, call=None):
        super().__init__()
        self.before, self.block, self.call = nn.Linear(4, 4), block, call

    def forward(self, x):
        h = self.before(x)
        return self.block(h) if self.call is None else self.call(self.block, h)


def answers(block, h):
    found = block(h, [h * 2, {"k": h}], scale=0.5, mask=(h > 0).float())
    return found["y"], found["more"][0] * found["n"]


def twice(block, h):
    return block(block(h))


def keeps(block, h):
    with torch.no_grad():
        y = block(h)
    return y + block(h) * 2


def within(block: nn.Module, h: Tensor) -> Tensor:
    """A layer that gives a tuple."""
    return block(h, h, h)[0] if isinstance(block, nn.MultiheadAttention) else block(h)[0]


@functools.cache
def trains() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A TARGET of the command line."""
    torch.manual_seed(0)
    return Net(Repeats()), (torch.randn(3, 4),)


class _Adjoint(torch.autograd.Function):
    """An adjoint method: its backward runs the module again, and gives three times the gradient."""

    @staticmethod
    def forward(ctx, module, x, *parameters):
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        return module(x)

    @staticmethod
    def backward(ctx, g):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.module(x), [x, *parameters], g)
        return None, *(3 * each for each in found)


class Adjoint(nn.Module):
    """Calls a Function that takes a module."""

    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x):
        return _Adjoint.apply(self.inner, x, *self.inner.parameters())


class Recomputes(Repeats):
    """Its backward runs its forward again."""

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def solve(dynamics, x, steps=3, *, options=None):
    """Steps of a solver that has a gradient of its own, for its dynamics, too."""
    for _ in range(steps if x.detach().numpy().size else 0):
        x = x + options["step"] * _Adjoint.apply(dynamics, x, *dynamics.parameters())
    return x


def blend(x, weight, factor):
    """Numbers of numpy, and a weight of its caller's."""
    return torch.from_numpy(np.tanh(x.detach().numpy())) * factor + x * weight


class Solves(nn.Module):
    """Calls functions, one of them with a module, twice."""

    def __init__(self, width=4):
        super().__init__()
        self.f, self.g = nn.Sequential(nn.Linear(width, width), nn.Tanh()), nn.Linear(width, width)
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return blend(solve(self.g, solve(self.f, x, 2, options={"step": 0.5}), options={"step": 0.1}), self.weight, 2.0)


def applied(inner, x):
    """Calls what it is handed."""
    return inner(x) * 2


class Applies(nn.Module):
    """One function, called with modules that write other buffers, with one that writes none, and with a function."""

    def __init__(self, width=4):
        super().__init__()
        self.norm, self.counts = Statistics(width), Tallies(width)
        self.still = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, width))

    def forward(self, x):
        for inner in (self.counts, self.norm, self.still, doubled, self.counts):
            x = applied(inner, x).sin()
        return x


def doubled(x):
    return x * 2


class Tallies(nn.Module):
    """A buffer that is written in place, behind three parameters."""

    def __init__(self, width=4):
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(width))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.linear(x) * self.scale + self.count


class _Powers(torch.autograd.Function):
    """The square and the cube; the gradient reads both."""

    @staticmethod
    def forward(ctx, x):
        square, cube = x**2, x**3
        ctx.save_for_backward(x, square, cube)
        return square, cube

    @staticmethod
    def backward(ctx, of_square, of_cube):
        x, square, cube = ctx.saved_tensors
        return 2 * of_square * cube / square + 3 * of_cube * square


class HalfOfPowers(nn.Module):
    """Returns one of the outputs of a Function; the other's value is in the gradient."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return _Powers.apply(self.linear(x).sin() + 2)[0]
