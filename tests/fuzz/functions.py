"""The Functions and classes that the files of the fuzzer name, all of them allowed.

`RAN` collects what no file may cause, even of an allowed class: constructors, setters and hooks that run.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import Function

RAN: list[str] = []


# ------------------------------------------------------------------------------------------- classes among arguments


class Mode(enum.Enum):
    UP = 2
    DOWN = 3

    @classmethod
    def _missing_(cls, value):
        RAN.append("Mode._missing_")


class Bits(enum.Flag):
    A = 1
    B = 2

    @classmethod
    def _missing_(cls, value):
        if not isinstance(value, int) or not 0 <= value < 4:
            RAN.append("Bits._missing_")  # what the members do not say is made up by the file
        return super()._missing_(value)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Config:
    size: int = 1
    part: Any = None


@dataclasses.dataclass
class Bomb:
    """Everything that could run when one is made."""

    size: int = 1
    part: Any = None

    def __new__(cls, *_: Any, **__: Any):
        RAN.append("Bomb.__new__")
        return object.__new__(cls)

    def __post_init__(self):
        RAN.append("Bomb.__post_init__")

    def __setstate__(self, state):
        RAN.append("Bomb.__setstate__")

    def __setattr__(self, name, value):
        RAN.append("Bomb.__setattr__")

    def __del__(self):
        if not vars(self).keys() <= {"size", "part"}:
            RAN.append("Bomb with other fields")


class _Setter:
    def __get__(self, instance, owner=None):
        return 1

    def __set__(self, instance, value):
        RAN.append("a descriptor's __set__")


@dataclasses.dataclass(init=False)
class BombField:
    """A field that is a data descriptor: filling it would run it."""

    size: int
    size = _Setter()  # type: ignore[assignment]  # noqa: PIE794


@dataclasses.dataclass
class BombDict(collections.OrderedDict):
    """A dict as well, as transformers' ModelOutput."""

    size: Any = None
    part: Any = None

    def __post_init__(self):
        RAN.append("BombDict.__post_init__")

    def __setitem__(self, key, value):
        RAN.append("BombDict.__setitem__")


class BombTuple(collections.namedtuple("BombTuple", "a b")):
    def __new__(cls, *items):
        RAN.append("BombTuple.__new__")
        return tuple.__new__(cls, items)


def helper(x):
    return x * 1


def unsafe(*_: Any, **__: Any):
    RAN.append("unsafe() was called")


@dataclasses.dataclass
class Result:
    loss: Any = None
    more: Any = None


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """As transformers' ModelOutput: its entries are its fields."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None:
                collections.OrderedDict.__setitem__(self, field.name, value)


# ---------------------------------------------------------------------------------------------------------- Functions


class Marked(Exception):
    """What a Function of the fuzzer raises on purpose."""


class Scale(Function):
    @staticmethod
    def forward(ctx, x, factor=2.0, mode="mean"):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None, None


@torch.library.custom_op("fuzz_operators::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float, sizes: list[int], mode: str) -> torch.Tensor:
    """An operator of a file; its sizes and mode are not used."""
    return x * factor


scaled.register_fake(lambda x, factor, sizes, mode: torch.empty_like(x))
scaled.register_autograd(lambda ctx, g: (g * 5, None, None, None))
# The first call of a custom_op imports Dynamo, which makes a folder of its own.
scaled(torch.ones(1, requires_grad=True), 1.0, [], "").sum().backward()


class Sine(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


class TwoOut(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b, a + b

    @staticmethod
    def backward(ctx, g, h):
        a, b = ctx.saved_tensors
        return g * b + h, g * a + h


class Largest(Function):
    """An output without gradient beside one that has one."""

    @staticmethod
    def forward(ctx, x):
        values, index = x.max(-1)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return values, index

    @staticmethod
    def backward(ctx, g, _):
        (index,) = ctx.saved_tensors
        return torch.zeros(ctx.shape, dtype=g.dtype).scatter_(-1, index[..., None], g[..., None])


class Odd(Function):
    """Outputs that are no tensors."""

    @staticmethod
    def forward(ctx, x):
        return x * 2, None, "text", {"more": x + 1}

    @staticmethod
    def backward(ctx, g, *rest):
        return g * 2


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Sized(Function):
    @staticmethod
    def forward(ctx, x, size):
        ctx.size = size
        return x * size

    @staticmethod
    def backward(ctx, g):
        return g * ctx.size, None


class Takes(Function):
    """Any arguments; the tensor comes first."""

    @staticmethod
    def forward(ctx, x, *rest, **more):
        ctx.count = len(rest)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return (g * 2, *[None] * ctx.count)


class Sums(Function):
    """Tensors in a container."""

    @staticmethod
    def forward(ctx, x, parts):
        return x + parts["a"] + parts["b"][0]

    @staticmethod
    def backward(ctx, g):
        return g, None


class Strings(Function):
    """Strings: torch has none, they come and go as numpy arrays."""

    @staticmethod
    def forward(ctx, a):
        return np.array([str(s) + "!" for s in a.flat], dtype=object).reshape(a.shape)

    @staticmethod
    def backward(ctx, g):
        return None


class Product(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g.to(b.dtype) @ b.t(), a.t() @ g.to(a.dtype)


class Raises(Function):
    @staticmethod
    def forward(ctx, x):
        raise Marked("forward")

    @staticmethod
    def backward(ctx, g):
        raise Marked("backward")


class RaisesBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        raise Marked("backward")


class Steps(torch.autograd.Function):
    """A quantiser, which is declared one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
        return torch.clamp(torch.round(x / scale), 0, 2**bits - 1) * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None
