"""Products with a logarithm at 0, and the logarithm of the normal distribution's function."""

from __future__ import annotations

import math

import torch

from symbolics.errors import ExportError
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import in_place, instead

__all__ = ["LOGARITHMS", "QUIRK"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="special.log_ndtr is the logarithm of ndtr, which is 0 below -6 in float32; the gradient of xlogy(0, 0) is NaN; logaddexp is the logarithm of a sum that "
    "overflows; TorchScript has none of them",
)


def _xlogy(x: torch.Tensor | float, y: torch.Tensor | float) -> torch.Tensor:
    """0 where x is, whatever y is; there the gradient of x is log(y), and 0 where that is none."""
    like = x if isinstance(x, torch.Tensor) else y
    assert isinstance(like, torch.Tensor)
    dtype = torch.result_type(x, y)
    if not dtype.is_floating_point:
        return NotImplemented
    x, y = (torch.as_tensor(v, dtype=dtype) for v in (x, y))
    nothing = (x == 0) & (y <= 0)
    product = x * torch.log(torch.where(nothing, torch.ones_like(y), y))
    return torch.where(nothing, x * 0, product)


# The exponent of the complementary error function's Chebyshev fit: Numerical Recipes in C, 2nd edition, section 6.2. Error 1.2e-7.
_EXPONENT = (-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277)


def _log_ndtr(x: torch.Tensor) -> torch.Tensor:
    """log(erfc(-x / sqrt(2)) / 2), of which the part that decays is known as a sum, not as a power."""
    if x.dtype is torch.float64:
        raise ExportError("special.log_ndtr in float64 has no translation to ONNX as exact as that: compute it in float32, x.float()")
    z = x * -math.sqrt(0.5)
    size = torch.where(z > 0, z, -z)  # its slope at 0 is not 0
    t = 1 / (1 + size / 2)
    exponent = torch.zeros_like(t)
    for factor in reversed(_EXPONENT):
        exponent = exponent * t + factor
    tail = torch.log(t) + exponent - size * size - math.log(2)  # log(erfc(|z|) / 2)
    below = torch.where(z > 0, tail, torch.full_like(tail, -1.0))
    beyond = torch.where(z > 0, torch.full_like(tail, -1.0), tail)
    return torch.where(z > 0, below, torch.log1p(-torch.exp(beyond)))


def _xlog1py(x: torch.Tensor | float, y: torch.Tensor | float) -> torch.Tensor:
    return _xlogy(x, 1 + y)


def _log_add_exp(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """log(e^x + e^y) by the greater of both, of which equals share the gradient."""
    apart = torch.where(x == other, torch.zeros_like(x), -(x - other).abs())  # equals may be infinite
    return torch.maximum(x, other) + torch.log1p(torch.exp(apart))


def _log_add_exp2(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return _log_add_exp(x * math.log(2), other * math.log(2)) / math.log(2)


LOGARITHMS = {
    **dict.fromkeys((torch.special.xlog1py,), instead(_xlog1py)),
    **dict.fromkeys((torch.logaddexp, torch.Tensor.logaddexp), instead(_log_add_exp)),
    **dict.fromkeys((torch.logaddexp2, torch.Tensor.logaddexp2), instead(_log_add_exp2)),
    **dict.fromkeys((torch.xlogy, torch.Tensor.xlogy, torch.special.xlogy), instead(_xlogy)),
    torch.Tensor.xlogy_: in_place(instead(_xlogy), torch.xlogy),
    torch.special.log_ndtr: instead(_log_ndtr),
}
