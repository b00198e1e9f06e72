"""Rounding towards zero, quotients that are rounded, and shifts, in torch.onnx.export(dynamo=False)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, in_place, instead_in_torchscript

__all__ = ["QUIRK", "ROUNDING"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript rounds towards zero through int64, which has no infinity, no NaN and nothing beyond 9e18; its floor_divide rounds towards zero; "
    "its right shift of a negative number fills up with zeros",
)


def _trunc(x: torch.Tensor) -> torch.Tensor:
    """Down where x is positive, up elsewhere."""
    if not x.is_floating_point():
        return NotImplemented
    return torch.where(x > 0, torch.floor(x), torch.ceil(x))


def _div(x: torch.Tensor | float, other: torch.Tensor | float, *, rounding_mode: str | None = None) -> torch.Tensor:
    dtype = torch.result_type(x, other)
    if rounding_mode != "trunc" or not dtype.is_floating_point:
        return NotImplemented
    quotient = torch.true_divide(x, other)
    return torch.where(quotient > 0, torch.floor(quotient), torch.ceil(quotient))


def _floor_divide(x: torch.Tensor | float, other: torch.Tensor | float) -> torch.Tensor:
    return torch.div(x, other, rounding_mode="floor")


def _right_shift(x: torch.Tensor | int, other: torch.Tensor | int) -> torch.Tensor:
    """A negative number, as the complement of its complement's shift."""
    x = torch.as_tensor(x)
    flipped = torch.where(x < 0, -1 - x, x)
    shifted = torch.bitwise_right_shift(flipped, other)
    return torch.where(x < 0, -1 - shifted, shifted)


_FORMULAS: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
    (_trunc, ("trunc", "fix")),
    (_div, ("div", "divide")),
    (_floor_divide, ("floor_divide",)),
    (_right_shift, ("bitwise_right_shift",)),
]
ROUNDING: dict[Any, Rewrite] = {}
for _formula, _names in _FORMULAS:
    _rewrite = instead_in_torchscript(_formula)
    for _name in _names:
        ROUNDING[getattr(torch, _name)] = ROUNDING[getattr(torch.Tensor, _name)] = _rewrite
        ROUNDING[getattr(torch.Tensor, f"{_name}_")] = in_place(_rewrite, getattr(torch, _name))
ROUNDING |= {
    torch.Tensor.__floordiv__: ROUNDING[torch.floor_divide],
    torch.Tensor.__rshift__: ROUNDING[torch.bitwise_right_shift],
}
