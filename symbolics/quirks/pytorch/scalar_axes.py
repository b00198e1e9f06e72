"""Reductions and sorts of a scalar along an axis: PyTorch takes axis 0 of a tensor without axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, call

__all__ = ["QUIRK", "scalar_axes"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="axis 0 or -1 of a scalar, which PyTorch takes, stays an axis in the file, and ONNX refuses it: ReduceMax, ReduceMean, ArgMax, TopK, Slice",
)

#: Where an axis is given. `norm` is not here: it is Python's code around `torch.linalg.vector_norm`, and what stands in for that is found only while
#: nothing stands in for `norm`. `max` and `min` are also of two tensors.
_ALONG = ("amax", "amin", "aminmax", "max", "min", "argmax", "argmin", "sum", "mean", "prod", "flip")
#: With or without an axis.
_ALWAYS = ("sort", "argsort", "msort", "topk", "std", "var", "std_mean", "var_mean")


def _of_one_element(inner: Rewrite | None, along: int | None) -> Rewrite:
    """The call on a vector of one element in place of a scalar, and scalars of its results.

    Args:
        inner: What stands in for the function already.
        along: Which argument is the axis; None: also without one.
    """

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs.get("input")
        given = along is None or kwargs.get("dim") is not None or (len(args) > along and _is_axes(args[along]))
        if not args or not isinstance(x, torch.Tensor) or x.dim() or not given or kwargs.get("out") is not None:
            return call(inner, func, args, kwargs)
        found = call(inner, func, (x.unsqueeze(0), *args[1:]), kwargs)
        return found.reshape(()) if isinstance(found, torch.Tensor) else type(found)([each.reshape(()) for each in found])

    return called


def _is_axes(value: Any) -> bool:
    return type(value) is int or (isinstance(value, (tuple, list)) and all(type(each) is int for each in value))


def scalar_axes(rewrites: Mapping[Any, Rewrite]) -> dict[Any, Rewrite]:
    """Around what stands in for a function already, if anything does."""
    found: dict[Any, Rewrite] = {}
    for place in (torch, torch.Tensor):
        for name in (*_ALONG, *_ALWAYS):
            if (function := getattr(place, name, None)) is not None:
                found[function] = _of_one_element(rewrites.get(function), None if name in _ALWAYS else 1)
    for function in (torch.linalg.vector_norm, torch.linalg.norm):
        found[function] = _of_one_element(rewrites.get(function), 2)
    return found
