"""Functions with a forward-mode derivative of their own, and some that have none. Importable, as files name them."""

from __future__ import annotations

import numpy as np
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class SavesForForward(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w)
        return x.sin() * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * x.cos() * w, g * x.sin()

    @staticmethod
    def jvp(ctx, vx, vw):
        x, w = ctx.saved_tensors
        return vx * x.cos() * w + vw * x.sin()


class OwnSlope(Function):
    """Its jvp is not the derivative of its forward, nor the transpose of its backward: who asks which ran, sees it."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 5

    @staticmethod
    def jvp(ctx, v):
        return v * 7


class NoneTangents(Function):
    """Without materialised tangents: what does not move is None."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, g * x

    @staticmethod
    def jvp(ctx, vx, vw):
        x, w = ctx.saved_tensors
        assert vx is not None or vw is not None
        return w * (3 if vx is None else vx) + (0 if vw is None else x * vw)


class TwoByTwo(Function):
    """Two inputs, a number, two outputs; the second does not depend on the second input."""

    @staticmethod
    def forward(ctx, x, factor, z):
        ctx.factor = factor
        ctx.save_for_forward(x, z)
        ctx.save_for_backward(x, z)
        return x * z * factor, x.exp()

    @staticmethod
    def backward(ctx, g, h):
        x, z = ctx.saved_tensors
        return g * z * ctx.factor + h * x.exp(), None, g * x * ctx.factor

    @staticmethod
    def jvp(ctx, vx, _, vz):
        x, z = ctx.saved_tensors
        return (vx * z + x * vz) * ctx.factor, vx * x.exp()


class DirtyWithJvp(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, g):
        return g * 3

    @staticmethod
    def jvp(ctx, v):
        return v.mul_(3)


class WithIndices(Function):
    """The second output is not differentiable, the third is a float that is marked so."""

    @staticmethod
    def forward(ctx, x):
        y, index = x.sort(-1)
        rank = index.to(x.dtype)
        ctx.mark_non_differentiable(index, rank)
        ctx.save_for_backward(index)
        ctx.save_for_forward(index)
        return y, index, rank

    @staticmethod
    def backward(ctx, g, _, __):
        (index,) = ctx.saved_tensors
        return torch.zeros_like(g).scatter(-1, index, g)

    @staticmethod
    def jvp(ctx, v):
        (index,) = ctx.saved_tensors
        return v.gather(-1, index), None, None


class WithSetupContext(Function):
    @staticmethod
    def forward(x, power=2):
        return x**power

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.power = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ctx.power * x ** (ctx.power - 1), None

    @staticmethod
    def jvp(ctx, v, _):
        (x,) = ctx.saved_tensors
        return v * ctx.power * x ** (ctx.power - 1)


class NoJvp(Function):
    """Its backward can be differentiated; it is that of a surrogate, which the forward is not."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x * w).round()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        slope = 1 / (1 + (x * w).square())
        return g * slope * w, g * slope * x


class OnceWithoutJvp(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g * 2


class NumpyBackward(Function):
    """Its backward leaves autograd: differentiated, it would be zero."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return torch.from_numpy(np.asarray(g.detach()) * 2)


class ClipsGradient(Function):
    """Its backward is not linear: there is no tangent that it is the transpose of."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return (g * 2).clamp(-1, 1)


class RaisesInJvp(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2

    @staticmethod
    def jvp(ctx, v):
        raise KeyError("no direction")
