"""Python's arithmetic with open sizes and floats, for torch.onnx.export(dynamo=True) and for the bodies of portable Functions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnxscript.function_libs.torch_lib.ops.core import aten_mul_scalar as torchlibs_product

from symbolics.quirks.opset import constant, number, op
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "in_floats", "number_arithmetic"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib",
    seen="0.7.2",
    wrong="a float that meets an open size is written in float32, so that its digits are gone where a tensor in float64 follows; mul.Scalar by what is "
    "computed from one is refused",
)

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def in_floats(value: Any) -> Any:
    """A number in float32; a float of Python by a Cast of all its digits, which `symbolics.quirks.pytorch.wide_sizes` finds."""
    if isinstance(value, ir.Value):
        return value if value.dtype in _FLOATS else op.Cast(value, to=ir.DataType.FLOAT)
    return op.Cast(constant(float(value), ir.DataType.DOUBLE), to=ir.DataType.FLOAT)


def _computes(op_type: str, always: bool = False) -> Callable[..., Any]:
    def translation(self: Any, other: Any) -> Any:
        is_float = always or any(isinstance(v, float) or (isinstance(v, ir.Value) and v.dtype in _FLOATS) for v in (self, other))
        return getattr(op, op_type)(*((in_floats(self), in_floats(other)) if is_float else (self, other)))

    return translation


def _product(x: ir.Value, other: Any) -> Any:
    """aten::mul.Scalar: the gradient of a variance has 2 / n."""
    return op.Mul(x, number(other, x)) if isinstance(other, ir.Value) else torchlibs_product(x, other)


def number_arithmetic() -> dict[Any, Callable[..., Any]]:
    """For the ``custom_translation_table``."""
    return {
        torch.ops.aten.mul.Scalar: _product,
        operator.add: _computes("Add"),
        operator.sub: _computes("Sub"),
        operator.mul: _computes("Mul"),
        operator.pow: _computes("Pow"),
        operator.truediv: _computes("Div", always=True),
    }
