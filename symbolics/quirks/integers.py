"""Integers and Python's numbers in torch.onnx.export(dynamo=False): the type of a result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite

__all__ = ["QUIRK", "promoting"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript computes an integer and 0.5 in float64, clamps integers by 0 where the bound is 0.5, takes True for no number, and writes "
    "functions of floats on integers, which ONNX has not",
)

_NUMBERS = (bool, int, float)
_BOTH = (
    "add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "remainder", "fmod", "pow", "maximum", "minimum",
    "eq", "ne", "not_equal", "clamp", "clip", "clamp_min", "clamp_max",
    "bitwise_and", "bitwise_or", "bitwise_xor",
    "__eq__", "__ne__", "__and__", "__or__", "__xor__",
)  # fmt: skip
_ORDERED = ("lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal")
_FILLED = ("full_like", "masked_fill")
_OF_FLOATS = (
    "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p",
    "sqrt", "rsqrt", "sigmoid", "erf", "reciprocal", "xlogy", "atan2",
)  # fmt: skip


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, (torch.Tensor, *_NUMBERS))]


def _common(operands: list[Any], ordered: bool) -> torch.dtype | None:
    """The type in which eager computes integers with numbers; None where that is the tensors' own."""
    tensors = [value for value in operands if isinstance(value, torch.Tensor)]
    if not tensors or any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        return None
    if any(isinstance(value, float) for value in operands):
        # A trace has tensors without dimensions for sizes: those are Python's numbers, as exact as they were.
        return torch.get_default_dtype() if any(tensor.dim() for tensor in tensors) else None
    whole = any(type(value) is int or (ordered and isinstance(value, bool)) for value in operands) and all(
        tensor.dtype is torch.bool for tensor in tensors
    )
    return torch.int64 if whole else None


def _changed(value: Any, dtype: torch.dtype | None, truth: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value if dtype is None else value.to(dtype)
    return value if not isinstance(value, bool) else torch.tensor(value) if truth else int(value)


def _promoted(inner: Rewrite | None, places: slice, always: bool = False, fills: bool = False, ordered: bool = False) -> Rewrite:
    """The call, or what stands in for it, with its operands in the type that eager computes in."""

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call() -> Any:
            return func(*args, **kwargs) if inner is None else inner(func, args, kwargs)

        if not private.is_tracing():
            return call()
        named = {key: value for key, value in kwargs.items() if key in ("min", "max", "other", "exponent")}
        operands = _operands(args[places], named)
        dtype = None if fills else _common(operands, ordered)
        tensors = [value for value in operands if isinstance(value, torch.Tensor)]
        if always and dtype is None and tensors and not any(t.is_floating_point() or t.is_complex() for t in tensors):
            dtype = torch.get_default_dtype()
        truth = not fills and dtype is None and bool(tensors) and all(tensor.dtype is torch.bool for tensor in tensors)
        args = (
            *args[: places.start or 0],
            *(_changed(value, dtype, truth) for value in args[places]),
            *(args[places.stop :] if places.stop is not None else ()),
        )
        kwargs = {**kwargs, **{key: _changed(value, dtype, truth) for key, value in named.items()}}
        return call()

    return called


def promoting(rewrites: Mapping[Any, Rewrite]) -> dict[Any, Rewrite]:
    """Around what stands in for a function already, if anything does."""
    found = {torch.where: _promoted(rewrites.get(torch.where), slice(1, 3))}
    for place in (torch, torch.Tensor):
        for names, places, how in (
            (_BOTH, slice(0, 3), {}),
            (_ORDERED, slice(0, 3), {"ordered": True}),
            (_FILLED, slice(0, None), {"fills": True}),
            (_OF_FLOATS, slice(0, 2), {"always": True}),
        ):
            functions = [getattr(place, name) for name in names if hasattr(place, name)]
            found |= {function: _promoted(rewrites.get(function), places, **how) for function in functions}
    return found
