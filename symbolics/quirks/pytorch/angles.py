"""atan2, the angle of (x, y), and the angle of a complex number."""

from __future__ import annotations

import math
from typing import Any

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, in_place, instead

__all__ = ["ANGLES", "QUIRK"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="atan2(y, x) is written as atan(y / x) with a correction: atan2(0, -1) is -pi, and every gradient at x = 0 is NaN; so is that of "
    "the angle of a complex 0",
)


def _negative(x: torch.Tensor) -> torch.Tensor:
    """Whether the sign bit is set: that of a zero shows in its reciprocal."""
    return torch.where(x == 0, x.reciprocal(), x) < 0


def _angle(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The arc tangent of a quotient that is 1 at most, and the octant.

    Its derivatives are x / (x^2 + y^2) and -y / (x^2 + y^2) without a square that overflows, and 0 at the origin.
    """
    if not (y.is_floating_point() and x.is_floating_point()):
        return NotImplemented
    y, x = torch.broadcast_tensors(y, x)
    down, left = _negative(y.detach()), _negative(x.detach())
    infinite = torch.isinf(x) & torch.isinf(y)
    y, x = (torch.where(infinite, torch.sign(v), v) for v in (y, x))
    steep = y.abs() > x.abs()
    upper, lower = torch.where(steep, x, y), torch.where(steep, y, x)
    origin = lower == 0
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    angle = torch.atan(torch.where(origin, zero, upper) / torch.where(origin, one, lower))
    sign = torch.where(down, -one, one)
    flat = torch.where(left, angle + sign * math.pi, torch.where(origin, sign * 0.0, angle))
    return torch.where(steep, sign * (math.pi / 2) - angle, flat)


def _of_complex(x: torch.Tensor) -> torch.Tensor:
    return _angle(x.imag, x.real) if x.is_complex() else NotImplemented


_INSTEAD = instead(_angle)
ANGLES: dict[Any, Rewrite] = {
    **dict.fromkeys((torch.atan2, torch.arctan2, torch.Tensor.atan2, torch.Tensor.arctan2), _INSTEAD),
    **dict.fromkeys((torch.angle, torch.Tensor.angle), instead(_of_complex)),
    **dict.fromkeys((torch.Tensor.atan2_, torch.Tensor.arctan2_), in_place(_INSTEAD, torch.atan2)),
}
