"""Shifts of integers, and bits beside Python's numbers, for torch.onnx.export(dynamo=True)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

from symbolics.node.dtypes import onnx_type
from symbolics.quirks.opset import constant, op
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "shifts"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib",
    seen="0.7.2",
    wrong="a shifted uint8 is declared an int8, so that the file is invalid; shifts of int16 have no kernel; x << y of two tensors has no translation; "
    "shifts by as many bits as there are, or by less than 0, are undefined; a number that the type does not have (-16 beside uint8, 255 beside int8) fails",
)

_INT64, _UINT64 = ir.DataType.INT64, ir.DataType.UINT64
_WHOLE = (ir.DataType.INT32, _INT64)  # what onnxruntime multiplies and divides

_Translation = Callable[[Any, Any], Any]


def _example(value: Any) -> Any:
    if not isinstance(value, ir.Value):
        return value
    assert value.dtype is not None
    return torch.empty((0,) if value.shape is None or len(value.shape) else (), dtype=tensor_adapters.to_torch_dtype(value.dtype))


def _as_type(value: Any, dtype: ir.DataType) -> Any:
    """A value in that type; of a number the one that eager mode takes for it: 240 for -16 in uint8."""
    if isinstance(value, ir.Value):
        return value if value.dtype == dtype else op.Cast(value, to=dtype)
    return constant(_wrapped(value, dtype), dtype)


def _wrapped(number: int, dtype: ir.DataType) -> int:
    if dtype == ir.DataType.BOOL:
        return int(bool(number))
    number %= 1 << dtype.bitwidth
    return number - (1 << dtype.bitwidth) if dtype.is_signed() and number >> (dtype.bitwidth - 1) else number


def _of_one_type(translation: Callable[[Any, Any, ir.DataType], Any]) -> _Translation:
    """The translation of two values, given these in the type of eager mode's result, and that; numbers stay numbers."""

    def translated(self: Any, other: Any) -> Any:
        dtype = ir.DataType(onnx_type(torch.result_type(_example(self), _example(other))))
        one, two = (_as_type(v, dtype) if isinstance(v, ir.Value) else _wrapped(v, dtype) for v in (self, other))
        return translation(one, two, dtype)

    return translated


def _shift(direction: str) -> _Translation:
    def translation(x: Any, bits: Any, dtype: ir.DataType) -> Any:
        if not isinstance(bits, ir.Value) and 0 <= bits < dtype.bitwidth - 1:
            if dtype == ir.DataType.UINT8:
                return op.BitShift(x, constant(bits, dtype), direction=direction)
            if dtype in _WHOLE:
                power = constant(1 << bits, dtype)
                return op.Mul(x, power) if direction == "LEFT" else op.Div(op.Sub(x, op.Mod(x, power)), power)
        wide, number = (op.Cast(_as_type(v, dtype), to=_INT64) for v in (x, bits))
        return op.Cast(_in_64_bits(wide, number, direction), to=dtype)

    return _of_one_type(translation)


def _in_64_bits(x: Any, bits: Any, direction: str) -> Any:
    """Of numbers in int64: to the left 0 where the number of bits is out of range, to the right the sign alone."""
    none, most = constant(0, _INT64), constant(63, _INT64)
    within = op.Where(op.Less(bits, none), most, op.Min(bits, most))

    def shifted(value: Any) -> Any:
        return op.Cast(op.BitShift(op.Cast(value, to=_UINT64), op.Cast(within, to=_UINT64), direction=direction), to=_INT64)

    if direction == "LEFT":
        return op.Where(op.Equal(bits, within), shifted(x), none)
    negative = op.Less(x, none)
    rest = shifted(op.Where(negative, op.BitwiseNot(x), x))
    return op.Where(negative, op.BitwiseNot(rest), rest)


def _bits(of_integers: str, of_truths: str) -> _Translation:
    def translation(one: Any, other: Any, dtype: ir.DataType) -> Any:
        written = of_truths if dtype == ir.DataType.BOOL else of_integers
        return getattr(op, written)(_as_type(one, dtype), _as_type(other, dtype))

    return _of_one_type(translation)


def shifts() -> dict[Any, Callable[..., Any]]:
    """For the ``custom_translation_table``."""
    aten = torch.ops.aten
    left, right = _shift("LEFT"), _shift("RIGHT")
    found: dict[Any, Callable[..., Any]] = {
        aten.__lshift__.Scalar: left,
        aten.__lshift__.Tensor: left,
        aten.__rshift__.Scalar: right,
        aten.__rshift__.Tensor: right,
    }
    of_two = {
        "bitwise_left_shift": left,
        "bitwise_right_shift": right,
        "bitwise_and": _bits("BitwiseAnd", "And"),
        "bitwise_or": _bits("BitwiseOr", "Or"),
        "bitwise_xor": _bits("BitwiseXor", "Xor"),
    }
    for name, translation in of_two.items():
        packet = getattr(aten, name)
        found |= dict.fromkeys((packet.Tensor, packet.Scalar_Tensor), translation)
        found[getattr(packet, "Tensor_Scalar" if name.endswith("shift") else "Scalar")] = translation
    return found
