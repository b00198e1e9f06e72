"""Functions that are declared as quantisers; no graph can stand for most of them, as they look at numbers in Python."""

from __future__ import annotations

import torch

import exporter


class Opaque(torch.autograd.Function):
    """What is left a PythonOp by a portable export, too: a Python decision on a value."""

    @staticmethod
    def backward(ctx, grad):
        return grad, *[None] * ctx.more


def _look(ctx, x, more):
    ctx.more = more
    if x.numel() and bool(torch.isnan(x).any()):
        raise ValueError("nan")


class Lsq(Opaque):
    @staticmethod
    def forward(ctx, x, s, low, high):
        _look(ctx, x, 3)
        return torch.clamp(torch.round(x / s), low, high) * s


class Reciprocal(Opaque):
    @staticmethod
    def forward(ctx, x, s, low, high):
        _look(ctx, x, 3)
        return torch.clamp(torch.round(x * (1 / s)), low, high) * s


class Halves(Opaque):
    """Rounds halves up."""

    @staticmethod
    def forward(ctx, x, s, low, high):
        _look(ctx, x, 3)
        return torch.clamp(torch.floor(x / s + 0.5), low, high) * s


class Channels(Opaque):
    """Steps in one axis, which it puts in place by itself."""

    @staticmethod
    def forward(ctx, x, s, bits):
        _look(ctx, x, 2)
        s = s.reshape(-1, *[1] * (x.ndim - 1))
        top = 2 ** (bits - 1) - 1
        return torch.clamp(torch.round(x / s), -top, top) * s


class Pact(Opaque):
    @staticmethod
    def forward(ctx, x, alpha, k):
        _look(ctx, x, 2)
        scale = (2**k - 1) / alpha
        return torch.round(torch.minimum(x.clamp(min=0), alpha) * scale) / scale


class Dorefa(Opaque):
    @staticmethod
    def forward(ctx, x, k):
        _look(ctx, x, 1)
        n = float(2**k - 1)
        return torch.round(x * n) / n


class Affine(Opaque):
    @staticmethod
    def forward(ctx, x, s, z):
        _look(ctx, x, 2)
        return (torch.clamp(torch.round(x / s) + z, 0, 255) - z) * s


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x, s):
        _look(type("ctx", (), {})(), x, 0)
        return torch.clamp(torch.round(x / s), -8, 7) * s

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Wrong(Lsq):
    """Declared otherwise in each test."""


class Statistics(Opaque):
    """Its step comes of all numbers together."""

    @staticmethod
    def forward(ctx, x, s):
        _look(ctx, x, 1)
        step = x.abs().amax() / 127 * s
        return torch.round(x / step) * step


def declare_all():
    exporter.quantizer(Lsq, scale="s", bits=("low", "high"))
    exporter.quantizer(Reciprocal, scale="s", bits=("low", "high"))
    exporter.quantizer(Halves, scale="s", bits=("low", "high"))
    exporter.quantizer(Channels, scale="s", bits="bits", axis=0)
    exporter.quantizer(Pact, scale="alpha / (2 ** k - 1)", bits="k")
    exporter.quantizer(Dorefa, scale="1 / (2 ** k - 1)")
    exporter.quantizer(Affine, scale="s", zero_point="z", bits=8)
    exporter.quantizer(NewStyle, scale="s", bits=4)
