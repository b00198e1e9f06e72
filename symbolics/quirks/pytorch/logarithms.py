"""Logarithms and powers beside 1 and beside infinity, products with a logarithm at 0."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from symbolics import torch_private as private
from symbolics.errors import ExportError
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import in_place, instead, stopped

__all__ = ["LOGARITHMS", "QUIRK", "erfc_exponent", "log1p", "log_add"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="special.log_ndtr is the logarithm of ndtr, which is 0 below -6 in float32; the gradient of xlogy(0, 0) is NaN; logaddexp is the logarithm of a sum that "
    "overflows; TorchScript has none of them; log1p and expm1 are log(1 + x) and exp(x) - 1, which have no digits of a small x; "
    "erfcx is a product of what overflows and 0; the gradients of sinc and of special.entr at 0 are NaN",
)


_SMALL = 0.5


def log1p(x: torch.Tensor) -> torch.Tensor:
    """log(1 + x), whose slope is exact, and what it lacks where x is small: x times log(u) / (u - 1) has all digits for any u near 1 + x."""
    if not x.is_floating_point():
        return NotImplemented
    small = torch.where(x.abs() < _SMALL, x, torch.zeros_like(x))
    u = 1 + small
    beyond = u - 1
    none = beyond == 0
    exact = torch.where(none, small, torch.log(u) * (small / torch.where(none, torch.ones_like(u), beyond)))
    return torch.log(1 + x) + stopped(exact - torch.log(u))


def _expm1(x: torch.Tensor) -> torch.Tensor:
    """exp(x) - 1, whose slope is exact, and what it lacks where x is small: exp(x) - 1 = tanh(x / 2) (exp(x) + 1)."""
    if not x.is_floating_point():
        return NotImplemented
    small = torch.where(x.abs() < _SMALL, x, torch.zeros_like(x))
    power = torch.exp(small)
    return (torch.exp(x) - 1) + stopped(torch.tanh(small / 2) * (power + 1) - (power - 1))


def _xlogy(x: torch.Tensor | float, y: torch.Tensor | float) -> torch.Tensor:
    return _product(x, y, 0.0, torch.log)


def _product(x: torch.Tensor | float, y: torch.Tensor | float, least: float, log: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """0 where x is, whatever y is; there the gradient of x is log(y), and 0 where that is none."""
    like = x if isinstance(x, torch.Tensor) else y
    assert isinstance(like, torch.Tensor)
    dtype = torch.result_type(x, y)
    if not dtype.is_floating_point:
        return NotImplemented
    x, y = (torch.as_tensor(v, dtype=dtype) for v in (x, y))
    nothing = (x == 0) & (y <= least)
    product = x * log(torch.where(nothing, torch.full_like(y, 1 + least), y))
    return torch.where(nothing, x * 0, product)


# The exponent of the complementary error function's Chebyshev fit: Numerical Recipes in C, 2nd edition, section 6.2. Error 1.2e-7.
_EXPONENT = (-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277)


def erfc_exponent(t: torch.Tensor) -> torch.Tensor:
    """log(erfc(x) / t) + x^2 for t = 2 / (2 + x) and x from 0 on."""
    exponent = torch.zeros_like(t)
    for factor in reversed(_EXPONENT):
        exponent = exponent * t + factor
    return exponent


def _inexact(name: str) -> ExportError:
    error = ExportError(
        f"{name.replace('_', '.', 1)} in float64 has no translation to ONNX as exact as that: compute it in float32, x.float(), "
        f'or keep it as one PythonOp by opaque=["aten::{name}"], or opaque="missing" for all such operators'
    )
    error.operators = (f"aten::{name}",)
    return error


def _log_ndtr(x: torch.Tensor) -> torch.Tensor:
    """log(erfc(-x / sqrt(2)) / 2), of which the part that decays is known as a sum, not as a power."""
    if x.dtype is torch.float64:
        raise _inexact("special_log_ndtr")
    z = x * -math.sqrt(0.5)
    size = torch.where(z > 0, z, -z)  # its slope at 0 is not 0
    t = 1 / (1 + size / 2)
    tail = torch.log(t) + erfc_exponent(t) - size * size - math.log(2)  # log(erfc(|z|) / 2)
    below = torch.where(z > 0, tail, torch.full_like(tail, -1.0))
    beyond = torch.where(z > 0, torch.full_like(tail, -1.0), tail)
    return torch.where(z > 0, below, torch.log1p(-torch.exp(beyond)))


def _xlog1py(x: torch.Tensor | float, y: torch.Tensor | float) -> torch.Tensor:
    return _product(x, y, -1.0, log1p)


def log_add(x: torch.Tensor, other: torch.Tensor, base: float = math.e) -> torch.Tensor:
    """log(b^x + b^y) to the base b, the greater of both divided out: a number to its slopes, which are smooth of any order, also between equals.

    A greatest element that is infinite is the sum; equals share its gradient.
    """
    greater = torch.maximum(x, other)
    infinite = greater.abs() == math.inf
    most, x, other = (torch.where(infinite, torch.zeros_like(greater), each) for each in (stopped(greater), x, other))
    powers = [torch.exp(each - most) if base == math.e else torch.pow(base, each - most) for each in (x, other)]
    logarithm = torch.log(powers[0] + powers[1])
    logarithm = logarithm + stopped(torch.log1p(torch.minimum(*powers)) - logarithm)  # with the digits of a small one
    return torch.where(infinite, greater, most + (logarithm if base == math.e else logarithm / math.log(base)))


def _erfcx(x: torch.Tensor) -> torch.Tensor:
    """exp(x^2) erfc(x), by the same fit: exp(x^2) alone overflows."""
    if not x.is_floating_point():
        return NotImplemented
    if x.dtype is torch.float64:
        raise _inexact("special_erfcx")
    size = torch.where(x >= 0, x, -x)  # whose slope at 0 is 1
    t = 1 / (1 + size / 2)
    right = t * torch.exp(erfc_exponent(t))
    left = torch.where(x < 0, x, torch.zeros_like(x))
    return torch.where(x < 0, 2 * torch.exp(left * left) - right, right)


def _sinc(x: torch.Tensor) -> torch.Tensor:
    """sin(pi x) / (pi x), which is flat at 0."""
    if not x.is_floating_point():
        return NotImplemented
    none = x == 0
    angle = math.pi * torch.where(none, torch.ones_like(x), x)
    return torch.where(none, torch.ones_like(x), torch.sin(angle) / angle)


def _entr(x: torch.Tensor) -> torch.Tensor:
    """-x log(x), whose slope at 0 is infinite, as that of the square root."""
    if not x.is_floating_point():
        return NotImplemented
    none = x == 0
    some = torch.where(none, torch.ones_like(x), x)
    product = torch.where(some < 0, torch.full_like(x, -torch.inf), -some * torch.log(some))
    return torch.where(none, torch.sqrt(torch.where(none, x, torch.ones_like(x))), product)


def _log_cum_sum_exp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Of 1, 2, 4, ... elements up to each, so that no element is lost beside one that is much greater. Where the size may be open, of a row for each."""
    if not x.is_floating_point() or dim not in range(-max(x.dim(), 1), max(x.dim(), 1)):
        return NotImplemented
    if x.dim() == 0:
        return x.clone()
    length, reach = x.shape[dim], 1
    if private.is_tracing() or not isinstance(length, int):  # a trace would keep the number of steps of the example
        last, places = x.movedim(dim, -1), torch.arange(length, device=x.device)
        rows = torch.where(places <= places.unsqueeze(-1), last.unsqueeze(-2), torch.full((), -math.inf, dtype=x.dtype, device=x.device))
        return torch.logsumexp(rows, -1).movedim(-1, dim)
    while reach < length:
        x = torch.cat([x.narrow(dim, 0, reach), log_add(x.narrow(dim, reach, length - reach), x.narrow(dim, 0, length - reach))], dim)
        reach *= 2
    return x


def _logit(x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    """The difference of two logarithms, whose slope at 0 and 1 is infinite."""
    if not x.is_floating_point():
        return NotImplemented
    p = x if eps is None else x.clamp(eps, 1 - eps)
    return torch.log(p) - torch.log(1 - p)


LOGARITHMS = {
    torch.special.erfcx: instead(_erfcx),
    **dict.fromkeys((torch.sinc, torch.Tensor.sinc, torch.special.sinc), instead(_sinc)),
    torch.Tensor.sinc_: in_place(instead(_sinc), torch.sinc),
    **dict.fromkeys((torch.logcumsumexp, torch.Tensor.logcumsumexp), instead(_log_cum_sum_exp)),
    **dict.fromkeys((torch.logit, torch.Tensor.logit, torch.special.logit), instead(_logit)),
    **dict.fromkeys((torch.log1p, torch.Tensor.log1p, torch.special.log1p), instead(log1p)),
    **dict.fromkeys((torch.expm1, torch.Tensor.expm1, torch.special.expm1), instead(_expm1)),
    torch.Tensor.log1p_: in_place(instead(log1p), torch.log1p),
    torch.Tensor.expm1_: in_place(instead(_expm1), torch.expm1),
    **dict.fromkeys((torch.special.xlog1py,), instead(_xlog1py)),
    **dict.fromkeys((torch.logaddexp, torch.Tensor.logaddexp), instead(log_add)),
    **dict.fromkeys((torch.xlogy, torch.Tensor.xlogy, torch.special.xlogy), instead(_xlogy)),
    torch.Tensor.xlogy_: in_place(instead(_xlogy), torch.xlogy),
    torch.special.entr: instead(_entr),
    torch.special.log_ndtr: instead(_log_ndtr),
}
