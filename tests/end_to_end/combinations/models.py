"""One model for every combination: a layer, control flow around a cell, a second layer. What varies is given to its constructor.

Control flow is said by one of three: Python (the reference: eager's own loops and branches), torch's operators for torch.export, and
scripted functions for TorchScript.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

__all__ = ["DTYPES", "DYNAMO", "FEATURES", "SCRIPTED", "Model", "inputs"]

#: Name -> (the type of parameters and inputs, the type of arithmetic). They differ under autocast.
DTYPES = {
    "float32": (torch.float32, torch.float32),
    "float64": (torch.float64, torch.float64),
    "float16": (torch.float16, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "autocast": (torch.float32, torch.bfloat16),
}
#: What a model has of its own; the first four may stand in one model.
FEATURES = ("tied", "frozen", "twice", "no_grad", "in place", "unused")


class Bend(torch.autograd.Function):
    """Not the derivative of its forward, so that a lost call shows; smooth, so that it has a second derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * (1.5 + 0.5 * ctx.saved_tensors[0].cos())


class Halves(torch.autograd.Function):
    """Two outputs; its backward takes zeros for one that nobody reads."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), x * 3

    @staticmethod
    def backward(ctx, g, h):
        return g * (1.5 + 0.5 * ctx.saved_tensors[0].cos()) + 2 * h


class Cell:
    """What one pass through the control flow computes of a state: (a state, something beside it)."""

    def __init__(self, function: bool, features: frozenset[str]) -> None:
        self.function, self.features = function, features

    def __call__(self, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        if "unused" in self.features:
            h, _ = Halves.apply(h) if self.function else torch.cat([h.sin(), h * 3], -1).split(h.shape[-1], -1)
        elif self.function:
            h = Bend.apply(h)
        if "in place" in self.features:
            h = h * 1.25
            h.mul_(w)
            h[..., 0] += 0.5
        return torch.tanh(h * w + 0.25), h * 0.5


# ------------------------------------------------------------------------------------------------------- torch.export
class Python:
    """The control flow of eager itself."""

    @staticmethod
    def choose(yes: Tensor, then: Callable, other: Callable, state: Tensor) -> Any:
        return then(state) if bool(yes) else other(state)

    @staticmethod
    def repeat(times: int, body: Callable, state: Tensor) -> tuple[Tensor, Tensor]:
        beside = torch.zeros_like(state)
        for number in range(times):
            state, beside = body(torch.tensor(number), state, beside)
        return state, beside

    @staticmethod
    def scan(body: Callable, state: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        out = []
        for number, row in enumerate(rows):
            state, beside = body(state, (row, torch.tensor(number)))
            out.append(beside)
        return state, torch.stack(out)


class Operators(Python):
    """torch.cond, while_loop and scan."""

    @staticmethod
    def choose(yes: Tensor, then: Callable, other: Callable, state: Tensor) -> Any:
        return torch.cond(yes, then, other, (state,))

    @staticmethod
    def repeat(times: int, body: Callable, state: Tensor) -> tuple[Tensor, Tensor]:
        start = (torch.tensor(0), state.clone(), torch.zeros_like(state))
        return while_loop(lambda i, s, t: i < times, lambda i, s, t: (i + 1, *body(i, s, t)), start)[1:]

    @staticmethod
    def scan(body: Callable, state: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return scan(body, state, (rows, torch.arange(len(rows))), dim=0)


def straight(flow, cell, h, w, positive):
    first, beside = cell(h, w)
    return cell(first, w)[0], beside


def cond(flow, cell, h, w, positive):
    return flow.choose(positive, lambda s: cell(s, w), lambda s: (s * w, s.cos()), h)


def loop(flow, cell, h, w, positive):
    return flow.repeat(3, lambda i, s, t: (cell(s, w)[0], cell(s, w)[1] + t * 0.5), h)


def scanned(flow, cell, h, w, positive):
    def body(s, given):
        row, _ = given
        s, beside = cell(s + row, w)
        return s, beside * row

    last, every = flow.scan(body, h[0] * 0.5, h)
    return every + last, every * 2


def cond_in_loop(flow, cell, h, w, positive):
    def body(i, s, t):
        s, beside = flow.choose(i % 2 == 0, lambda q: cell(q, w), lambda q: (q * w, q.cos()), s)
        return s, beside + t * 0.5

    return flow.repeat(3, body, h)


def loop_in_cond(flow, cell, h, w, positive):
    def then(s):
        return flow.repeat(3, lambda i, q, t: (cell(q, w)[0], cell(q, w)[1] + t * 0.5), s)

    return flow.choose(positive, then, lambda s: (s * w, s.cos()), h)


def cond_in_scan(flow, cell, h, w, positive):
    def body(s, given):
        row, number = given
        s, beside = flow.choose(number % 2 == 1, lambda q: cell(q, w), lambda q: (q * w, q.cos()), s + row)
        return s, beside * row

    last, every = flow.scan(body, h[0] * 0.5, h)
    return every + last, every * 2


DYNAMO = {
    "none": straight,
    "cond": cond,
    "while_loop": loop,
    "scan": scanned,
    "cond in while_loop": cond_in_loop,
    "while_loop in cond": loop_in_cond,
    "cond in scan": cond_in_scan,
}


# --------------------------------------------------------------------------------------------------------- TorchScript
def scripted_if(h: Tensor, w: Tensor, positive: Tensor, change: bool) -> tuple[Tensor, Tensor]:
    if bool(positive):
        s = h * 1.25
        if change:
            s.mul_(w)
            s[..., 0] += 0.5
        a, b = torch.tanh(s * w + 0.25), s * 0.5
    else:
        a, b = h * w, h.cos()
    return a, b


def scripted_loop(h: Tensor, w: Tensor, positive: Tensor, change: bool) -> tuple[Tensor, Tensor]:
    b = torch.zeros_like(h)
    for _ in range(h.shape[0]):
        s = h * 1.25
        if change:
            s.mul_(w)
            s[..., 0] += 0.5
        b = b * 0.5 + s
        h = torch.tanh(s * w + 0.25)
    return h, b


def scripted_if_in_loop(h: Tensor, w: Tensor, positive: Tensor, change: bool) -> tuple[Tensor, Tensor]:
    b = torch.zeros_like(h)
    for _ in range(h.shape[0]):
        s = h * 1.25
        if change:
            s.mul_(w)
            s[..., 0] += 0.5
        if bool(positive):
            h = torch.tanh(s * w + 0.25)
            b = b * 0.5 + s
        else:
            h = s * w
            b = s.cos()
    return h, b


def scripted_loop_in_if(h: Tensor, w: Tensor, positive: Tensor, change: bool) -> tuple[Tensor, Tensor]:
    b = torch.zeros_like(h)
    if bool(positive):
        for _ in range(h.shape[0]):
            s = h * 1.25
            if change:
                s.mul_(w)
                s[..., 0] += 0.5
            b = b * 0.5 + s
            h = torch.tanh(s * w + 0.25)
    else:
        b = h.cos()
        h = h * w
    return h, b


SCRIPTED = {
    "none": None,
    "If": scripted_if,
    "Loop": scripted_loop,
    "If in Loop": scripted_if_in_loop,
    "Loop in If": scripted_loop_in_if,
}


class Model(nn.Module):
    """Two outputs of two inputs.

    Args:
        flow: A name of DYNAMO or SCRIPTED.
        function: Whether the cell calls a Function.
        features: Some of FEATURES.
        dynamo: Which of both tables the name is of.
        plain: Whether the control flow is Python's.
        autocast: Whether forward computes in bfloat16.
    """

    def __init__(self, flow: str, function: bool, features: frozenset[str], dynamo: bool, plain: bool, autocast: bool) -> None:
        super().__init__()
        self.first, self.second, self.third, self.unseen = (nn.Linear(3, 3) for _ in range(4))
        self.w, self.e = nn.Parameter(torch.rand(3) + 0.5), nn.Parameter(torch.rand(3) + 0.5)
        if "tied" in features:
            self.second.weight = self.first.weight
        if "frozen" in features:
            self.third.weight.requires_grad_(False)
        self.features, self.autocast, self.function = features, autocast, function
        self.cell = Cell(function, features)
        self.scripted = None
        if dynamo:
            self.flow, self.way = DYNAMO[flow], Python if plain else Operators
        elif (scripted := SCRIPTED[flow]) is not None:
            self.scripted = scripted if plain else torch.jit.script(scripted)
        else:
            self.flow, self.way = straight, Python

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            return self.body(x, z)

    def body(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        h, positive = self.first(x), x.sum() > 0
        w = self.w.to(h.dtype)
        if self.scripted is not None:
            h, beside = self.scripted(h, w, positive, "in place" in self.features)
            if self.function or "unused" in self.features:
                h = self.cell(h, w)[0]
        else:
            h, beside = self.flow(self.way, self.cell, h, w, positive)
        h = self.second(h)
        if "twice" in self.features:
            h = h * x + x.cos()
        if "no_grad" in self.features:
            with torch.no_grad():
                stopped = self.unseen(h).tanh()
            h = h * stopped
        else:
            h = h + self.unseen(h).tanh()
        return self.third(h), (beside * self.e).sin() + z


def inputs(seed: int, dtype: torch.dtype, sign: float) -> tuple[Tensor, Tensor]:
    """Two inputs; the sum of the first is far from zero and of the given sign."""
    drawn = torch.Generator().manual_seed(seed)
    x, z = torch.rand(4, 3, generator=drawn) * 1.5 - 0.4, torch.randn(4, 3, generator=drawn)
    return tuple((t * s).bfloat16().to(dtype).requires_grad_() for t, s in ((x, sign), (z, 1.0)))
