"""Powers of integers and booleans, and by booleans, for torch.onnx.export(dynamo=True)."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from onnxscript.function_libs.torch_lib.ops import core

from symbolics.node.dtypes import onnx_type
from symbolics.quirks.opset import constant, op
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "power", "power_by_number"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib",
    seen="0.7.2",
    wrong="integers to the power of a float tensor without axes are integers, without a word: Pow has the type of its base; of bool, uint8, int8 and int16, and by bool, the file is invalid",
)

_SMALL = (ir.DataType.BOOL, ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.INT16)


def _example(value: ir.Value) -> torch.Tensor:
    assert value.dtype is not None
    return torch.empty((0,) if value.shape is None or len(value.shape) else (), dtype=tensor_adapters.to_torch_dtype(value.dtype))


def _in(base: ir.Value, exponent: ir.Value, dtype: ir.DataType) -> Any:
    """Computed in a type that Pow has, and of eager's type."""
    wide = ir.DataType.INT64 if dtype in _SMALL else dtype
    found = op.Pow(*(value if value.dtype == wide else op.Cast(value, to=wide) for value in (base, exponent)))
    return found if wide == dtype else op.Cast(found, to=dtype)


def power(base: ir.Value, exponent: ir.Value) -> Any:
    """aten::pow.Tensor_Tensor."""
    if base.dtype is None or exponent.dtype is None or (base.dtype.is_floating_point() and exponent.dtype not in _SMALL):
        return core.aten_pow(base, exponent)
    return _in(base, exponent, ir.DataType(onnx_type(torch.result_type(_example(base), _example(exponent)))))


def power_by_number(base: ir.Value, exponent: float) -> Any:
    """aten::pow.Tensor_Scalar."""
    if base.dtype not in _SMALL or not isinstance(exponent, int):
        return core.aten_pow_tensor_scalar(base, exponent)
    result = ir.DataType.INT64 if base.dtype == ir.DataType.BOOL else base.dtype
    return _in(base, constant(exponent, ir.DataType.INT64), result)
