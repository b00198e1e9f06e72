"""Functions of every habit that the semantics of one call has to follow. Importable, as files name them."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Mode(enum.Enum):
    UP = 2
    DOWN = 3


class SavesInput(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


class SavesOutput(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)


class SavesIntermediate(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.half = x / 2
        return ctx.half.square()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.half


class SavesNothing(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class KeepsInputOnCtx(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.x.exp()


class TwoInputs(Function):
    @staticmethod
    def forward(ctx, a, b, factor=2.0):
        ctx.save_for_backward(a, b)
        ctx.factor = factor
        ctx.needs = ctx.needs_input_grad
        return a * b * factor, a + b

    @staticmethod
    def backward(ctx, g0, g1):
        a, b = ctx.saved_tensors
        assert ctx.needs == ctx.needs_input_grad
        return g0 * b * ctx.factor + g1, (g0 * a * ctx.factor + g1) if ctx.needs[1] else None, None


class NoneGradient(Function):
    @staticmethod
    def forward(ctx, a, b):
        return a * 3 + b

    @staticmethod
    def backward(ctx, g):
        return g * 3, None


class TrailingNone(Function):
    @staticmethod
    def forward(ctx, a):
        return a * 3

    @staticmethod
    def backward(ctx, g):
        return g * 3, None, None


class Materializes(Function):
    on = True

    @staticmethod
    def forward(ctx, a):
        return a * 2, a * 5

    @staticmethod
    def backward(ctx, g0, g1):
        assert g0 is not None
        assert g1 is not None
        return g0 * 2 + g1 * 5


class DoesNotMaterialize(Function):
    @staticmethod
    def forward(ctx, a):
        ctx.set_materialize_grads(False)
        return a * 2, a * 5

    @staticmethod
    def backward(ctx, g0, g1):
        if g1 is None:
            return g0 * 100
        return g0 * 2 + g1 * 5 if g0 is not None else g1 * 1000


class IntegerOutput(Function):
    @staticmethod
    def forward(ctx, a):
        index = a.argmax(-1)
        ctx.save_for_backward(index)
        ctx.shape = a.shape
        return a.max(-1).values, index

    @staticmethod
    def backward(ctx, g, gi):
        (index,) = ctx.saved_tensors
        assert gi.dtype is torch.int64
        assert not gi.any()
        return torch.zeros(ctx.shape, dtype=g.dtype).scatter_(-1, index[..., None], g[..., None])


class OddOutputs(Function):
    @staticmethod
    def forward(ctx, a):
        return a * 2, None, "text", a + 1

    @staticmethod
    def backward(ctx, g, none, text, g2):
        assert none is None
        assert text is None
        return g * 2 + g2


class Dirty(Function):
    @staticmethod
    def forward(ctx, a):
        ctx.mark_dirty(a)
        return a.mul_(3)

    @staticmethod
    def backward(ctx, g):
        return g * 3


class NonDifferentiable(Function):
    @staticmethod
    def forward(ctx, a):
        mask = (a > 0).to(a.dtype)
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        return a * mask, mask

    @staticmethod
    def backward(ctx, g, gm):
        assert not gm.any()
        return g * ctx.saved_tensors[0]


class Once(Function):
    @staticmethod
    def forward(ctx, a):
        return a * 7

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return torch.from_numpy(g.numpy() * 7)


class ReturnsInput(Function):
    @staticmethod
    def forward(ctx, a):
        return a

    @staticmethod
    def backward(ctx, g):
        return -g


class ReturnsView(Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a[0].t() if a.dim() > 2 else a.t()

    @staticmethod
    def backward(ctx, g):
        (a,) = ctx.saved_tensors
        return g.t() * a.sign().abs()


class SetupContext(Function):
    @staticmethod
    def forward(x, power=3):
        return x**power

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, power = inputs
        ctx.save_for_backward(x)
        ctx.power = power

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ctx.power * x ** (ctx.power - 1), None


class Arguments(Function):
    @staticmethod
    def forward(ctx, x, pair, mode, table, dtype, *rest):
        a, b = pair["a"], pair["b"]
        ctx.factor = mode.value * table[1] + len(rest) + float(np.float32(0.5))
        table.append(1)  # arguments are the call's own in every run
        assert dtype is torch.float16
        assert rest == (None, "x")
        return x * ctx.factor + a * b

    @staticmethod
    def backward(ctx, g):
        return (g * ctx.factor, *[None] * 6)


class Sized(Function):
    @staticmethod
    def forward(ctx, x, size):
        assert type(size) is int
        ctx.size = size
        return x.reshape(size, -1) * size

    @staticmethod
    def backward(ctx, g):
        return g.reshape(-1) * ctx.size, None


class AutocastMatmul(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        assert not torch.is_autocast_enabled("cpu")
        return (g.to(b.dtype) @ b.t()), (a.t() @ g.to(a.dtype))


class Draws(Function):
    @staticmethod
    def forward(ctx, a):
        mask = torch.rand(a.shape) < 0.5
        ctx.save_for_backward(mask)
        return a * mask

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class ChangesInput(Function):
    """Changes its input without mark_dirty."""

    @staticmethod
    def forward(ctx, a):
        out = a * 2
        a.mul_(100)
        return out

    @staticmethod
    def backward(ctx, g):
        return g * 2


class ChangesInputThroughNumpy(Function):
    @staticmethod
    def forward(ctx, a):
        out = a * 2
        a.detach().numpy()[...] = -1
        return out

    @staticmethod
    def backward(ctx, g):
        return g * 2


class ChangesGradient(Function):
    @staticmethod
    def forward(ctx, a):
        return a * 2

    @staticmethod
    def backward(ctx, g):
        return g.mul_(2)


class Copies(Function):
    @staticmethod
    def forward(ctx, a):
        return a.clone()

    @staticmethod
    def backward(ctx, g):
        return g


class MaybeAbsent(Function):
    @staticmethod
    def forward(ctx, a, b, c):
        assert b is None
        return a + c

    @staticmethod
    def backward(ctx, g):
        return g, None, g


class Concatenates(Function):
    """Strings: torch has none, so they come and go as numpy arrays."""

    @staticmethod
    def forward(ctx, a):
        return np.array([str(s) + "!" for s in a.flat], dtype=object).reshape(a.shape)

    @staticmethod
    def backward(ctx, g):
        return None


class CustomError(Exception):
    """With an attribute, so that a test sees the very object."""

    def __init__(self, message: str, detail: Any) -> None:
        super().__init__(message)
        self.detail = detail


class Raises(Function):
    armed = True

    @staticmethod
    def forward(ctx, a):
        if Raises.armed and a.flatten()[0] < 0:
            raise CustomError("negative", {"at": 0})
        return a * 2

    @staticmethod
    def backward(ctx, g):
        if Raises.armed and g.flatten()[0] < 0:
            raise CustomError("negative gradient", {"at": 1})
        return g * 2


class ChangesLater(Function):
    """Its third call, and each from then on, changes its input without a word."""

    runs = 0

    @staticmethod
    def forward(ctx, x):
        ChangesLater.runs += 1
        y = x * 2
        if ChangesLater.runs >= 3:
            x.zero_()
        return y

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Cube(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


class Double(Function):
    @staticmethod
    def forward(ctx, x, scale=2):
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None
