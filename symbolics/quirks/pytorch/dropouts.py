"""Dropouts that torch's exporters do not write as a Dropout: of whole channels, alpha dropout, in place; and RReLU."""

from __future__ import annotations

import math
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, call, write

__all__ = ["DROPOUTS", "QUIRK"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="feature_dropout, alpha_dropout, feature_alpha_dropout and dropout_ are written as draws of the runtime, which no seed reaches and no eval mode "
    "stops (TorchScript refuses all but the last); rrelu is refused, or is such a draw",
)

_ALPHA = 1.7580993408473766  # ATen's Dropout.cpp


def _dropped(shape: Any, x: torch.Tensor, p: float) -> torch.Tensor:
    """A Dropout of ones: 0 where it drops, else 1 / (1 - p); in the eval mode that a loaded file has, 1 everywhere."""
    return torch.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p, True)


def _trains(x: torch.Tensor) -> torch.Tensor:
    """Whether the file runs in training mode: the Dropout gives 0 or 2 there."""
    return _dropped((1,), x, 0.5) != 1


def _scaled(x: torch.Tensor, p: float, shape: Any) -> torch.Tensor:
    return x * _dropped(shape, x, p)


def _alpha(x: torch.Tensor, p: float, shape: Any) -> torch.Tensor:
    """What is dropped becomes the value where SELU saturates; all is scaled and moved so that mean and variance stay."""
    drawn = _dropped(shape, x, p)
    scale = 1 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
    moved = _ALPHA * scale * p
    kept, dropped, still = (mask.to(x.dtype) for mask in (drawn > 1, drawn == 0, drawn == 1))
    return x * (kept * scale + still) + (kept * moved + dropped * (moved - _ALPHA * scale))


def _drops(formula: Any, *, channels: bool = False, inplace: bool = False) -> Rewrite:
    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(("input", "p", "train"), args), **kwargs)
        x, p, train = given["input"], given["p"], given["train"]
        if not train or not 0 < p <= 1 or (channels and x.dim() < 2):  # the last two: it drops nothing, or torch says what is wrong
            return func(*args, **kwargs)
        shape = (x.shape[0], x.shape[1], *[1] * (x.dim() - 2)) if channels else x.shape
        made = x * ~_trains(x) if p == 1 else formula(x, float(p), shape)  # onnxruntime has no Dropout of 1
        return write(x, made) if inplace else made

    return called


def _rrelu(inplace: bool) -> Rewrite:
    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(("input", "lower", "upper", "training", "generator"), args), **kwargs)
        x, lower, upper = given["input"], given.get("lower", 1 / 8), given.get("upper", 1 / 3)
        mean, width = (lower + upper) / 2, upper - lower
        if given.get("generator") is not None:
            return func(*args, **kwargs)
        if not given.get("training"):
            made = torch.nn.functional.leaky_relu(x, mean)
            return write(x, made) if inplace else made
        slope = mean + (torch.rand_like(x) - 0.5) * (_trains(x) * width)
        made = torch.where(x <= 0, x * slope, x)
        return write(x, made) if inplace else made

    return called


DROPOUTS: dict[Any, Rewrite] = {
    torch.dropout_: lambda func, args, kwargs: (
        call(None, func, args, kwargs) if private.is_tracing() else write((*args, kwargs.get("input"))[0], torch.dropout(*args, **kwargs))
    ),
    torch.feature_dropout: _drops(_scaled, channels=True),
    torch.feature_dropout_: _drops(_scaled, channels=True, inplace=True),
    torch.alpha_dropout: _drops(_alpha),
    torch.alpha_dropout_: _drops(_alpha, inplace=True),
    torch.feature_alpha_dropout: _drops(_alpha, channels=True),
    torch.feature_alpha_dropout_: _drops(_alpha, channels=True, inplace=True),
    torch.rrelu: _rrelu(inplace=False),
    torch.rrelu_: _rrelu(inplace=True),
}
