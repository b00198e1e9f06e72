"""Logarithms to the bases 2 and 10, which eager mode has exactly at the powers of these."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from symbolics.node.dtypes import HALVES
from symbolics.quirks.pytorch.logarithms import log_add
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, in_place, instead, stopped

__all__ = ["LOGARITHM_BASES", "QUIRK"]

QUIRK = Quirk(
    upstream="torch, onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="log2 and log10 are log(x) / log(2) and log(x) / log(10) in float32, whose ceil and floor at powers are one off: a quantiser's scale by a factor of 2",
)

#: Between 1 / base ** exponent and base ** exponent, a type has all powers with all of their digits.
_EXPONENTS = {(2, torch.float32): 126, (2, torch.float64): 1022, (10, torch.float32): 37, (10, torch.float64): 307}


def _logarithm(x: torch.Tensor, base: int) -> torch.Tensor:
    """The whole number that is nearest, and the logarithm of what is left when its power is divided out.

    What is left is near 1, exactly 1 at a power, so that its logarithm has no error that the sum would keep. For any whole number the sum is the
    logarithm, so that no gradient is lost beside it.
    """
    if x.is_complex():
        return NotImplemented
    if not x.is_floating_point():
        x = x.to(torch.get_default_dtype())
    unit = math.log(base)
    if x.dtype in HALVES:  # which have fewer digits than the error
        return (torch.log(x.float()) / unit).to(x.dtype)
    most = _EXPONENTS[base, x.dtype]
    whole = stopped(torch.clamp(torch.round(torch.log(x.abs()) / unit), -most, most))
    left = x * torch.pow(2.0, -whole) if base == 2 else x / torch.pow(10.0, whole)  # a power of 10 below 1 is no number of the type
    return whole + torch.log(left) / unit


def _log2(x: torch.Tensor) -> torch.Tensor:
    """log2(x), exactly a whole number at a power of two."""
    return _logarithm(x, 2)


def _log10(x: torch.Tensor) -> torch.Tensor:
    return _logarithm(x, 10)


def _log_add_exp2(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """log2(2^x + 2^y), exactly x + 1 for equals."""
    return log_add(x, other, 2.0)


def _of(formula: Callable[[torch.Tensor], torch.Tensor], name: str) -> dict[Any, Rewrite]:
    rewrite, function = instead(formula), getattr(torch, name)
    return {function: rewrite, getattr(torch.Tensor, name): rewrite, getattr(torch.Tensor, f"{name}_"): in_place(rewrite, function)}


LOGARITHM_BASES: dict[Any, Rewrite] = {
    **_of(_log2, "log2"),
    **_of(_log10, "log10"),
    **dict.fromkeys((torch.logaddexp2, torch.Tensor.logaddexp2), instead(_log_add_exp2)),
}
