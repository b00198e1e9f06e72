"""Integers, truth values and Python's numbers in torch.onnx.export(dynamo=False): the type in which they are computed, and that of the result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.onnx.errors import UnsupportedOperatorError

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, call, in_place, instead_in_torchscript

__all__ = ["BITS", "QUIRK", "XOR", "promoting"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript computes an integer and 0.5 in float64, clamps integers by 0 where the bound is 0.5, takes True for no number, divides and shifts "
    "uint8 by int8 in uint8, mixes int64 and bfloat16 in complex numbers, has no |, ^ and ~ of integers, and writes operators on types that ONNX or "
    "onnxruntime has them not for",
)

_TRUTH = frozenset({torch.bool})
_SMALL = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16})

#: Functions of two or three values, by the types that they are not computed in: those become int64, and the result what it is in eager mode.
_WIDENED = {
    frozenset[torch.dtype](): ("eq", "ne", "not_equal", "__eq__", "__ne__", "bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__"),
    _TRUTH: (
        "sign",
        "add", "sub", "subtract", "rsub", "mul", "multiply",
        "lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal",
    ),
    frozenset({torch.uint8}): ("neg", "negative", "__neg__"),
    _SMALL: (
        "div", "divide", "true_divide", "floor_divide", "__floordiv__", "remainder", "fmod", "pow", "maximum", "minimum", "clamp", "clip", "clamp_min", "clamp_max",
        "bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__",
    ),
}  # fmt: skip
#: How else the functions are called that change their first argument.
_IN_PLACE = {
    "add": ("add_", "__iadd__"), "sub": ("sub_", "subtract_", "__isub__"), "mul": ("mul_", "multiply_", "__imul__"),
    "div": ("div_", "divide_", "__itruediv__", "__idiv__"), "true_divide": ("true_divide_",), "floor_divide": ("floor_divide_", "__ifloordiv__"),
    "remainder": ("remainder_", "__imod__"), "fmod": ("fmod_",), "pow": ("pow_", "__ipow__"), "clamp": ("clamp_", "clip_"),
    "clamp_min": ("clamp_min_",), "clamp_max": ("clamp_max_",), "bitwise_not": ("bitwise_not_",), "neg": ("neg_", "negative_"), "sign": ("sign_",),
    "bitwise_and": ("bitwise_and_", "__iand__"), "bitwise_or": ("bitwise_or_", "__ior__"), "bitwise_xor": ("bitwise_xor_", "__ixor__"),
    "bitwise_left_shift": ("bitwise_left_shift_", "__ilshift__"), "bitwise_right_shift": ("bitwise_right_shift_", "__irshift__"),
    "relu": ("relu_",), "square": ("square_",), "floor": ("floor_",), "ceil": ("ceil_",), "round": ("round_",), "trunc": ("trunc_", "fix_"),
}  # fmt: skip
_LOGICAL = {"bitwise_and": torch.logical_and, "bitwise_or": torch.logical_or, "bitwise_xor": torch.logical_xor}
_BITS = {"__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor"}
_DIVISIONS = ("div", "divide", "true_divide")
_OPERANDS = (torch.Tensor, bool, int, float)
_NAMED = ("min", "max", "other", "exponent")
_FILLED = ("full", "full_like", "new_full", "masked_fill")
_OF_FLOATS = (
    "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p",
    "sqrt", "rsqrt", "sigmoid", "erf", "reciprocal", "xlogy", "atan2",
)  # fmt: skip


def _is_whole(value: Any) -> bool:
    return not (value.is_floating_point() or value.is_complex()) if isinstance(value, torch.Tensor) else isinstance(value, int)


def _common(operands: list[Any]) -> torch.dtype | None:
    """The type in which eager mode computes; None where TorchScript finds it itself."""
    first, *others = operands
    tensors = [value for value in operands if isinstance(value, torch.Tensor)]
    if all(map(_is_whole, operands)):
        found = (torch.result_type(first, other) for other in others or operands)
        return functools.reduce(torch.promote_types, found) if tensors else None
    if all(map(_is_whole, tensors)):
        # A trace has tensors without dimensions for sizes: those are Python's numbers, as exact as they were.
        return torch.get_default_dtype() if any(tensor.dim() for tensor in tensors) else None
    types = {tensor.dtype for tensor in tensors}
    return torch.result_type(*tensors) if len(tensors) == 2 == len(types) and torch.bfloat16 in types else None


def _as_type(value: Any, dtype: torch.dtype | None, wide: torch.dtype | None) -> Any:
    """A tensor in that type; a number as one of its numbers, of which True is one for truth values alone."""
    if isinstance(value, torch.Tensor):
        for to in (dtype, wide):
            value = value if to in (None, value.dtype) else value.to(to)
        return value
    if not isinstance(value, int):
        return value
    if dtype is torch.bool and wide is torch.bool:
        return torch.tensor(bool(value))
    if dtype in (None, torch.bool) or dtype.is_floating_point:
        return int(value)
    least, greatest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return (value - least) % (greatest - least + 1) + least  # -3 is 253 beside uint8


def _promoted(inner: Rewrite | None, places: slice = slice(0, 3), widened: frozenset[torch.dtype] = _SMALL, name: str = "") -> Rewrite:
    """The call, or what stands in for it, with its operands in the type that eager mode computes in.

    Args:
        inner: What stands in for the call, if anything does.
        places: Which positional arguments are operands.
        widened: The types that are computed in int64 instead; a result is cast back.
        name: The name of the function.
    """

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = [value for value in (*args[places], *(kwargs.get(key) for key in _NAMED)) if isinstance(value, _OPERANDS)]
        if not private.is_tracing() or not operands or kwargs.get("out") is not None:
            return call(inner, func, args, kwargs)
        divides = name in _DIVISIONS and kwargs.get("rounding_mode") is None  # into floats: a negative number stays one
        sizes = not any(value.dim() for value in operands if isinstance(value, torch.Tensor))
        dtype = torch.get_default_dtype() if divides and not sizes and all(map(_is_whole, operands)) else _common(operands)
        wide = torch.int64 if dtype in widened else dtype
        start, stop, _ = places.indices(len(args))
        args = tuple(_as_type(value, dtype, wide) if start <= i < stop else value for i, value in enumerate(args))
        kwargs = {key: _as_type(value, dtype, wide) if key in _NAMED else value for key, value in kwargs.items()}
        if dtype is torch.bool and name in _LOGICAL:
            result = _LOGICAL[name](*map(torch.as_tensor, args))
        elif name.startswith("bitwise_") and inner is None:  # __or__ has no translation
            result = getattr(torch, name)(*(torch.as_tensor(value, dtype=dtype) for value in args))
        else:
            result = call(inner, func, args, kwargs)
        return result.to(dtype) if dtype is not wide and result.dtype is wide else result

    return called


def _changing(inner: Rewrite | None, rewrite: Rewrite, name: str) -> Rewrite:
    """The call that changes its first argument: of whole numbers, what the function gives is written into it."""

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not private.is_tracing():
            return call(inner, func, args, kwargs)
        operands = [value for value in (*args, *kwargs.values()) if isinstance(value, _OPERANDS)]
        counts = name in ("add", "sub", "mul") and all(type(v) is int or getattr(v, "dtype", None) is torch.int64 for v in operands)
        if all(map(_is_whole, operands)) and not counts:  # the trace knows these itself, and a counter by its Adds
            return in_place(rewrite, getattr(torch, name))(func, args, kwargs)
        dtype = args[0].dtype if args[0].dtype is torch.bfloat16 else None
        args = (args[0], *(_as_type(value, dtype, None) for value in args[1:]))
        return call(inner, func, args, kwargs)

    return called


def _in_floats(inner: Rewrite | None) -> Rewrite:
    """The call of a function of floats, with whole numbers as floats."""

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [value for value in args[:2] if isinstance(value, torch.Tensor)]
        if private.is_tracing() and tensors and all(map(_is_whole, tensors)):
            args = tuple(value.to(torch.get_default_dtype()) if isinstance(value, torch.Tensor) else value for value in args)
        return call(inner, func, args, kwargs)

    return called


def _of_first(where: Rewrite) -> Rewrite:
    """``x.where(condition, other)``."""

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not private.is_tracing() or len(args) != 3:
            return func(*args, **kwargs)
        return where(torch.where, (args[1], args[0], args[2]), kwargs)

    return called


def _filled(inner: Rewrite | None, full: bool) -> Rewrite:
    """The call with 1 for True, and with 255 for -1 in uint8."""

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if private.is_tracing():
            *others, value = args
            if full and isinstance(value, bool) and kwargs.get("dtype") is None:
                kwargs = {**kwargs, "dtype": torch.bool}
            dtype = kwargs.get("dtype") or (others[0].dtype if others and isinstance(others[0], torch.Tensor) else None)
            args = (*others, _as_type(value, dtype, None) if isinstance(value, bool) or (isinstance(value, int) and dtype) else value)
        return call(inner, func, args, kwargs)

    return called


def _complement(x: torch.Tensor) -> torch.Tensor:
    return torch.logical_not(x) if x.dtype is torch.bool else (255 if x.dtype is torch.uint8 else -1) - x


def _as_it_is(x: torch.Tensor, **how: Any) -> Any:
    return x.clone() if _is_whole(x) and not how else NotImplemented


def _relu(x: torch.Tensor) -> Any:
    return x * (x > 0) if _is_whole(x) else NotImplemented


def _square(x: torch.Tensor) -> Any:
    return x.to(torch.int64) if x.dtype is torch.bool else NotImplemented


def _float_power(x: Any, exponent: Any) -> Any:
    if any(isinstance(value, complex) or getattr(value, "is_complex", bool)() for value in (x, exponent)):
        return NotImplemented
    operands: list[Any] = [value.double() if isinstance(value, torch.Tensor) else float(value) for value in (x, exponent)]
    return torch.pow(*operands)


_FORMULAS: dict[Callable[..., Any], tuple[str, ...]] = {
    _complement: ("bitwise_not", "__invert__"),
    _as_it_is: ("floor", "ceil", "round", "trunc", "fix"),
    _relu: ("relu",),
    _square: ("square",),
    _float_power: ("float_power",),
}


def _are_true_or_false(x: Any) -> bool:
    return bool(x.type().scalarType() == "Bool")


def _bitwise_or(original: Any, g: Any, x: Any, other: Any) -> Any:
    return original(g, x, other) if g.opset < 18 or _are_true_or_false(x) else g.op("BitwiseOr", x, other).setType(x.type())


def _bitwise_xor(g: Any, x: Any, other: Any) -> Any:
    if _are_true_or_false(x):
        return g.op("Xor", x, other).setType(x.type())
    if g.opset < 18:
        raise UnsupportedOperatorError("aten::bitwise_xor", g.opset, 18)
    return g.op("BitwiseXor", x, other).setType(x.type())


#: In place of a symbolic function of torch.onnx.export(dynamo=False), which takes truth values alone; ONNX has the others since opset 18.
BITS: dict[str, Callable[..., Any]] = {"aten::bitwise_or": _bitwise_or}
#: A symbolic function that it has none of.
XOR: dict[str, Callable[..., Any]] = {"aten::bitwise_xor": _bitwise_xor}

Make = Callable[[Rewrite | None, str], Rewrite]


def _whole(formula: Callable[..., Any]) -> Make:
    return lambda inner, _: instead_in_torchscript(formula, inner)


def _wide(widened: frozenset[torch.dtype]) -> Make:
    return lambda inner, name: _promoted(inner, widened=widened, name=_BITS.get(name, name))


_MAKES: list[tuple[tuple[str, ...], Make]] = [
    *((names, _wide(widened)) for widened, names in _WIDENED.items()),
    *((names, _whole(formula)) for formula, names in _FORMULAS.items()),
    (_FILLED, lambda inner, name: _filled(inner, name == "full")),
    (_OF_FLOATS, lambda inner, _: _in_floats(inner)),
]


def promoting(rewrites: Mapping[Any, Rewrite]) -> dict[Any, Rewrite]:
    """Around what stands in for a function already, if anything does."""
    where = _promoted(rewrites.get(torch.where), slice(1, 3), frozenset({torch.bool, torch.int16}))
    found: dict[Any, Rewrite] = {torch.where: where, torch.Tensor.where: _of_first(where)}
    for place in (torch, torch.Tensor):
        for names, make in _MAKES:
            for name in names:
                if (function := getattr(place, name, None)) is not None:
                    found[function] = make(rewrites.get(function), name)
    for name, names in _IN_PLACE.items():
        for function in (getattr(torch.Tensor, other) for other in names if hasattr(torch.Tensor, other)):
            found[function] = _changing(rewrites.get(function), found[getattr(torch, name)], name)
    return found
