"""Operators on types that ONNX or onnxruntime has none for: they are computed in another type, and the result is cast back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, call

__all__ = ["QUIRK", "narrow_types"]

QUIRK = Quirk(
    upstream="torch, onnxruntime",
    seen="2.13, 1.30",
    wrong="torch.onnx writes softmax of integers in integers, cumsum of small integers, sort of truth values and bfloat16, products of matrices of small integers; "
    "onnxruntime has no Trilu, NonZero, ArgMax, ReduceMax and Where of some small types",
)

_BYTES = {torch.uint8: torch.int32, torch.int8: torch.int32}
_INT16 = {torch.int16: torch.int32}

#: Functions, and what a type of their arguments becomes.
_TYPES: list[tuple[tuple[str, ...], dict[torch.dtype, torch.dtype]]] = [
    (("tril", "triu", "matmul", "mm", "bmm", "__matmul__"), {**_BYTES, **_INT16}),
    (("nonzero", "argwhere"), dict.fromkeys((torch.int8, torch.int16, torch.float16, torch.float64), torch.bool)),
    (("max", "min", "amax", "amin", "aminmax", "argmax", "argmin"), _INT16),
    (("masked_fill",), {torch.bool: torch.uint8, **_INT16}),
    (("sort", "topk", "argsort"), {torch.bool: torch.uint8, torch.bfloat16: torch.float32}),
]
_PLACES = {"argwhere", "nonzero", "argmax", "argmin", "argsort"}  # their results are places
_SUMS = ("cumsum",)
_SOFTMAX = ("softmax", "log_softmax")


def _in_type(inner: Rewrite | None, types: dict[torch.dtype, torch.dtype], back: bool) -> Rewrite:
    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        narrow = args[0].dtype if args and isinstance(args[0], torch.Tensor) else None
        wide = types.get(narrow) if narrow is not None else None
        if wide is None or kwargs.get("out") is not None:
            return call(inner, func, args, kwargs)

        def widened(x: torch.Tensor) -> torch.Tensor:
            if x.dtype is not narrow or (narrow is torch.bool and x is not args[0]):  # a mask
                return x
            return x != 0 if wide is torch.bool else x.to(wide)

        args, kwargs = pytree.tree_map_only(torch.Tensor, widened, (args, kwargs))
        result = call(inner, func, args, kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(narrow) if t.dtype is wide else t, result) if back else result

    return called


def _cumulative(inner: Rewrite | None) -> Rewrite:
    """Integers are summed in int64, which is what eager mode gives."""

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, dtype = args[0] if args else None, kwargs.get("dtype")
        small = (torch.bool, torch.uint8, torch.int8, torch.int16)
        if not isinstance(x, torch.Tensor) or kwargs.get("out") is not None or not (dtype in small or (dtype is None and x.dtype in small)):
            return call(inner, func, args, kwargs)
        # In the asked type first: 2.7 counts as 2, and 300 as 44.
        x = x.to(torch.int64) if dtype in (None, x.dtype) else x.to(dtype).to(torch.int64)
        result = call(inner, func, (x, *args[1:]), {**kwargs, "dtype": None})
        return result if dtype is None else result.to(dtype)

    return called


def _soft(inner: Rewrite | None) -> Rewrite:
    """Integers in the type that is asked for, first."""

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [value for value in (*args, kwargs.get("dtype")) if isinstance(value, torch.dtype)]
        x = args[0] if args else None
        if given and isinstance(x, torch.Tensor) and not x.is_floating_point() and not x.is_complex():
            args = (x.to(given[0]), *args[1:])
        return call(inner, func, args, kwargs)

    return called


def narrow_types(rewrites: Mapping[Any, Rewrite]) -> dict[Any, Rewrite]:
    """Around what stands in for a function already, if anything does."""
    found: dict[Any, Rewrite] = {}
    for place in (torch, torch.Tensor):
        for names, types in _TYPES:
            for name in names:
                if (function := getattr(place, name, None)) is not None:
                    found[function] = _in_type(rewrites.get(function), types, name not in _PLACES)
        for name in _SUMS:
            found[getattr(place, name)] = _cumulative(rewrites.get(getattr(place, name)))
        for name in _SOFTMAX:
            found[getattr(place, name)] = _soft(rewrites.get(getattr(place, name)))
    return found
