"""Quantisers as people write them: Functions of their own, and operators around a rounding that gradients pass."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["ACTIVATIONS", "WEIGHTS", "Act", "Conv", "ConvT", "Linear", "Round"]


class Ste(torch.autograd.Function):
    """Rounds, cuts off, scales; gradients pass between the ends."""

    @staticmethod
    def forward(ctx, x, s, low, high):
        ctx.save_for_backward(x, s)
        ctx.ends = low, high
        return torch.clamp(torch.round(x / s), low, high) * s

    @staticmethod
    def backward(ctx, grad):
        x, s = ctx.saved_tensors
        q = x / s
        return grad * ((q >= ctx.ends[0]) & (q <= ctx.ends[1])), None, None, None


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Floor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.floor(x + 0.5)

    @staticmethod
    def backward(ctx, grad):
        return grad


class GradScale(torch.autograd.Function):
    """LSQ's scale of gradients, as a Function."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class LsqFunction(torch.autograd.Function):
    """LSQ in one Function, its backward by hand."""

    @staticmethod
    def forward(ctx, x, s, low, high):
        ctx.save_for_backward(x, s)
        ctx.ends = low, high
        return (x / s).clamp(low, high).round() * s

    @staticmethod
    def backward(ctx, grad):
        x, s = ctx.saved_tensors
        low, high = ctx.ends
        q = x / s
        inside = (q >= low) & (q <= high)
        ds = torch.where(inside, q.round() - q, q.clamp(low, high)) * grad / math.sqrt(x.numel() * high)
        return grad * inside, ds.sum_to_size(s.shape), None, None


class Pact(torch.autograd.Function):
    """PACT: cut off at 0 and at an alpha that learns."""

    @staticmethod
    def forward(ctx, x, alpha, bits):
        ctx.save_for_backward(x, alpha)
        scale = (2**bits - 1) / alpha
        return torch.round(torch.minimum(torch.clamp(x, min=0), alpha) * scale) / scale

    @staticmethod
    def backward(ctx, grad):
        x, alpha = ctx.saved_tensors
        return grad * ((x >= 0) & (x <= alpha)), (grad * (x >= alpha)).sum().reshape(alpha.shape), None


def lsq(x, s, low, high):
    g = 1.0 / math.sqrt(x.numel() * high)
    s = (s - s * g).detach() + s * g
    return Round.apply((x / s).clamp(low, high)) * s


def grad_scale(x, s, low, high):
    s = GradScale.apply(s, 1.0 / math.sqrt(x.numel() * high))
    return Round.apply(torch.clamp(x / s, low, high)) * s


def detach(x, s, low, high):
    return x + (torch.clamp(torch.round(x / s), low, high) * s - x).detach()


def detach_steps(x, s, low, high):
    """The rounding alone is passed by gradients."""
    q = x / s
    q = (q.round() - q).detach() + q
    return torch.clamp(q, low, high) * s


def floor_half(x, s, low, high):
    return torch.clamp(Floor.apply(x / s), low, high) * s


def by_tensors(x, s, low, high):
    ends = x.new_tensor(low), x.new_tensor(high)
    return torch.minimum(torch.maximum(Round.apply(x / s), ends[0]), ends[1]) * s


def by_where(x, s, low, high):
    q = Round.apply(x / s)
    q = torch.where(q < low, torch.full_like(q, low), q)
    return torch.where(q > high, torch.full_like(q, high), q) * s


def in_numbers(x, s, low, high):
    """Cut off in numbers, before the rounding."""
    return Round.apply(torch.minimum(torch.maximum(x, low * s), high * s) / s) * s


def fake(x, s, low, high):
    if s.numel() > 1:
        axis = next(i for i, size in enumerate(s.shape) if size > 1)
        return torch.fake_quantize_per_channel_affine(x, s.detach().flatten(), torch.zeros(s.numel(), dtype=torch.int32), axis, low, high)
    return torch.fake_quantize_per_tensor_affine(x, s.detach(), torch.zeros((), dtype=torch.int32), low, high)


#: name -> (x, step, low, high) -> the rounded x
WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "ste": Ste.apply,
    "lsq": lsq,
    "lsq function": LsqFunction.apply,
    "grad scale": grad_scale,
    "detach": detach,
    "detach steps": detach_steps,
    "floor": floor_half,
    "tensors": by_tensors,
    "where": by_where,
    "numbers": in_numbers,
    "fake": fake,
}


def asymmetric(x, s, low, high):
    return (torch.clamp(torch.round(x / s) + 37, 0, 255) - 37) * s


def zero_inside(x, s, low, high):
    """The zero point is added before the rounding, as torch's learnable quantisers do."""
    return (torch.clamp(Round.apply(x / s + 37), 0, 255) - 37) * s


def lsq_plus(x, s, low, high):
    """An offset of a whole number of steps."""
    offset = (s * -12).detach()
    return Round.apply(((x - offset) / s).clamp(0, 255)) * s + offset


def lsq_plus_free(x, s, low, high):
    """An offset that falls between two steps."""
    offset = s.detach() * -12.37
    return Round.apply(((x - offset) / s).clamp(0, 255)) * s + offset


def dynamic(x, s, low, high):
    s = x.detach().abs().amax() / high
    return Round.apply((x / s).clamp(low, high)) * s


def per_token(x, s, low, high):
    s = x.detach().abs().amax(-1, keepdim=True) / high
    return Round.apply((x / s).clamp(low, high)) * s


def pact(x, s, low, high):
    return Pact.apply(x, s * high, 8)


def never_cut(x, s, low, high):
    return Round.apply(x / s) * s


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    **WEIGHTS,
    "asymmetric": asymmetric,
    "zero inside": zero_inside,
    "lsq+": lsq_plus,
    "lsq+ free": lsq_plus_free,
    "dynamic": dynamic,
    "per token": per_token,
    "pact": pact,
    "never cut": never_cut,
}


class Act(nn.Module):
    """A quantiser of activations: 8 bits, from 0 or around it, with a step that learns."""

    def __init__(self, kind="ste", *, signed=False, bits=8, narrow=False, step=None):
        super().__init__()
        self.kind = kind
        self.low, self.high = (-(2 ** (bits - 1)) + narrow, 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        self.s = nn.Parameter(torch.tensor(step or (3.1 if signed else 4.03) / self.high))

    def forward(self, x):
        return ACTIVATIONS[self.kind](x, self.s, self.low, self.high)


class _Weighted(nn.Module):
    def _set(self, weight, kind, bits, axis):
        self.kind, self.bits, self.high = kind, bits, 2 ** (bits - 1) - 1
        around = [i for i in range(weight.ndim) if i != axis]
        steps = weight.detach().abs().amax() if axis is None else weight.detach().abs().amax(around, keepdim=True)
        self.ws = nn.Parameter(steps / self.high)

    def quantized(self):
        return WEIGHTS[self.kind](self.weight, self.ws, -self.high, self.high)


class Conv(_Weighted):
    """A convolution, its weight quantised by channels; ``of`` its class."""

    def __init__(self, *sizes, kind="ste", bits=8, of=nn.Conv2d, channels=True, **options):
        super().__init__()
        self.of = of(*sizes, **options)
        self._set(self.weight, kind, bits, 0 if channels else None)

    @property
    def weight(self):
        return self.of.weight

    def forward(self, x):
        return self.of._conv_forward(x, self.quantized(), self.of.bias)


class ConvT(_Weighted):
    def __init__(self, *sizes, kind="ste", bits=8, **options):
        super().__init__()
        self.of = nn.ConvTranspose2d(*sizes, **options)
        self._set(self.of.weight, kind, bits, None)

    @property
    def weight(self):
        return self.of.weight

    def forward(self, x):
        return nn.functional.conv_transpose2d(x, self.quantized(), self.of.bias, self.of.stride, self.of.padding)


class Linear(_Weighted):
    """A linear layer, its weight quantised by rows."""

    def __init__(self, inputs, outputs, *, kind="ste", bits=8, bias=True, channels=True):
        super().__init__()
        self.of = nn.Linear(inputs, outputs, bias)
        self._set(self.of.weight, kind, bits, 0 if channels else None)

    @property
    def weight(self):
        return self.of.weight

    def forward(self, x):
        return nn.functional.linear(x, self.quantized(), self.of.bias)
