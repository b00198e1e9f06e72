"""clamp with bounds that are tensors, or an int and a float."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, in_place, instead, stopped

__all__ = ["BOUNDS", "QUIRK"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="clamp with tensors is written as Max and Min, which share a gradient between x and a bound that it equals: torch gives it to x; of an int and a float "
    "torch.onnx (dynamo=True) makes a tensor of one alone, and finds no overload",
)


def _tensor(bound: Any) -> torch.Tensor:
    """A bound as it is, if it is one: in a trace torch.as_tensor is a cast to float32 of a number that follows from a size."""
    return bound if isinstance(bound, torch.Tensor) else torch.as_tensor(bound)


def _clamped(x: torch.Tensor, min: Any = None, max: Any = None) -> torch.Tensor:
    """A bound has the gradient beyond it; of a lower one that is not below the upper one, the upper has it, and at equality none."""
    if not any(isinstance(bound, torch.Tensor) for bound in (min, max)):
        if {type(min), type(max)} != {int, float}:
            return NotImplemented
        return torch.clamp(x if x.is_floating_point() else x.to(torch.get_default_dtype()), float(min), float(max))
    dtype = torch.result_type(x, min if isinstance(min, torch.Tensor) else max)
    if isinstance(min, torch.Tensor) and isinstance(max, torch.Tensor):
        dtype = torch.promote_types(dtype, torch.result_type(x, max))
    if not dtype.is_floating_point:
        return NotImplemented
    low, high = (None if bound is None else _tensor(bound).to(dtype) for bound in (min, max))
    y = x = x.to(dtype)
    if low is not None:
        y = torch.where(x < low, low if high is None else torch.where(low < high, low, stopped(low)), x)
    return y if high is None else torch.where(y > high, high, y)


def _lower(x: torch.Tensor, min: Any) -> torch.Tensor:
    return _clamped(x, min)


def _upper(x: torch.Tensor, max: Any) -> torch.Tensor:
    return _clamped(x, None, max)


BOUNDS: dict[Any, Rewrite] = {}
for _names, _formula in ((("clamp", "clip"), _clamped), (("clamp_min",), _lower), (("clamp_max",), _upper)):
    for _name in _names:
        BOUNDS[getattr(torch, _name)] = BOUNDS[getattr(torch.Tensor, _name)] = instead(_formula)
        BOUNDS[getattr(torch.Tensor, f"{_name}_")] = in_place(instead(_formula), getattr(torch, _name))
