"""Remainders of floats, and quotients that are rounded down, which eager mode has from an exact fmod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.node.dtypes import HALVES
from symbolics.quirks.pytorch.rounding import ROUNDING
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, in_float, in_place, instead

__all__ = ["QUIRK", "REMAINDERS"]

QUIRK = Quirk(
    upstream="torch, onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="x % y of floats is x - y * floor(x / y), and x // y floor(x / y), of a quotient that was rounded: near multiples the remainder is off by all "
    "of y, the quotient by 1",
)


def _floats(x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor | float] | None:
    """Both in the type of eager's result, a divisor that is a number as one; None where they are no floats, or the sizes of a trace."""
    tensors = [value for value in (x, y) if isinstance(value, torch.Tensor)]
    dtype = torch.result_type(x, y)
    if not dtype.is_floating_point or (private.is_tracing() and not any(value.is_floating_point() for value in tensors)):
        return None
    keeps = dtype not in HALVES  # in which a number is rounded before anything is computed
    x, y = (
        value.to(dtype)
        if isinstance(value, torch.Tensor)
        else value
        if keeps and i
        else torch.full((), value, dtype=dtype, device=tensors[0].device)
        for i, value in enumerate((x, y))
    )
    return x, y


def _wrapped(rest: torch.Tensor, y: torch.Tensor | float, other: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """One where the rest is on the other side of 0 than the divisor, else the other."""
    beyond = torch.where(y < 0, -rest, rest) < 0 if isinstance(y, torch.Tensor) else rest > 0 if y < 0 else rest < 0
    return torch.where(beyond, one, other)


@in_float
def _rest(x: torch.Tensor, y: torch.Tensor | float) -> torch.Tensor:
    rest = torch.fmod(x, y)
    return _wrapped(rest, y, rest, rest + y)


def _below(x: torch.Tensor, y: torch.Tensor | float) -> torch.Tensor:
    """The whole number that the quotient of what the rest leaves was before it was rounded; by 0 the quotient."""
    rest = torch.fmod(x, y)
    exact = (x - rest) / y
    quotient = _wrapped(rest, y, exact, exact - 1)
    whole = torch.floor(quotient)
    whole = torch.where(quotient - whole > 0.5, whole + 1, whole)
    return torch.where(y == 0, torch.floor(x / y), whole) if isinstance(y, torch.Tensor) else whole


def _remainder(x: Any, other: Any) -> Any:
    floats = _floats(x, other)
    return NotImplemented if floats is None else _rest(*floats)


def _floor_divide(x: Any, other: Any) -> Any:
    floats = _floats(x, other)
    # Eager mode rounds each step in a half type, where onnxruntime may not.
    if floats is None or floats[0].dtype in HALVES or (not isinstance(other, torch.Tensor) and other == 0):
        return NotImplemented
    return _below(*floats)


def _div(x: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    return _floor_divide(x, other) if rounding_mode == "floor" else NotImplemented


_FORMULAS: list[tuple[Callable[..., Any], tuple[str, ...], tuple[str, ...]]] = [
    (_remainder, ("remainder",), ("mod",)),
    (_floor_divide, ("floor_divide",), ("floordiv",)),
    (_div, ("div", "divide"), ()),
]
REMAINDERS: dict[Any, Rewrite] = {}
for _formula, _names, _methods in _FORMULAS:
    for _name in _names:
        _function = getattr(torch, _name)
        _rewrite = instead(_formula, ROUNDING.get(_function))
        REMAINDERS |= dict.fromkeys((_function, getattr(torch.Tensor, _name)), _rewrite)
        REMAINDERS[getattr(torch.Tensor, f"{_name}_")] = in_place(_rewrite, _function)
    for _name in _methods:
        REMAINDERS[getattr(torch.Tensor, f"__{_name}__")] = _rewrite
        REMAINDERS[getattr(torch.Tensor, f"__i{_name}__")] = in_place(_rewrite, _function)
