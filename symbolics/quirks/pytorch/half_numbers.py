"""Arithmetic of a tensor in float16 with a number that float16 does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from symbolics.quirks.pytorch.remainders import REMAINDERS
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, call, instead, write

__all__ = ["HALF_NUMBERS", "QUIRK"]

QUIRK = Quirk(
    upstream="torch, onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="a number beside a tensor in float16 is written in float16: x / 90000 becomes x / inf, and x * 1e-8 becomes x * 0, where eager mode computes in "
    "float32",
)

_RANGE = torch.finfo(torch.float16)


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float16


def _is_beyond(value: Any) -> bool:
    """Whether float16 has no such number, or fewer of its digits."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.dtype in (torch.int32, torch.int64, torch.float32, torch.float64)
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return True
    return isinstance(value, (int, float)) and (abs(value) > _RANGE.max or 0 < abs(value) < _RANGE.tiny)


def _in_float(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The function of a tensor in float16 and a number, computed in float32. (Eager mode's sums have the number in float16.)"""

    def formula(input: Any, other: Any, **options: Any) -> Any:
        half, number = (input, other) if _is_half(input) else (other, input)
        if not _is_half(half) or not _is_beyond(number) or options.get("rounding_mode") is not None:
            return NotImplemented
        if isinstance(number, torch.Tensor) and number.is_floating_point() and not half.dim():
            return NotImplemented  # of two tensors without dimensions the wider type wins
        return function(*(value.float() if value is half else value for value in (input, other)), **options).half()

    return formula


def _changing(formula: Callable[..., Any], inner: Rewrite | None) -> Rewrite:
    """The call that changes its first argument: what the formula gives is written into it."""

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = formula(*args, **kwargs)
        return call(inner, func, args, kwargs) if result is NotImplemented else write(args[0], result)

    return called


HALF_NUMBERS: dict[Any, Rewrite] = {}
for _function, _names in ((torch.mul, ("mul", "multiply")), (torch.div, ("div", "divide", "true_divide"))):
    _formula = _in_float(_function)
    for _name in _names:
        for _place in (torch, torch.Tensor):
            HALF_NUMBERS[getattr(_place, _name)] = instead(_formula, REMAINDERS.get(getattr(_place, _name)))
        _changes = getattr(torch.Tensor, f"{_name}_")
        HALF_NUMBERS[_changes] = _changing(_formula, REMAINDERS.get(_changes))
