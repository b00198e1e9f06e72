"""arange with numbers of which one is a float."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from onnxscript.function_libs.torch_lib.ops.core import aten_arange, aten_arange_start, aten_arange_start_step

from symbolics.quirks.opset import constant, op
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "arange_end", "arange_start", "arange_step"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib",
    seen="0.7.2",
    wrong="arange(0, 3.5) is of integers: the first number alone says the type; one of float64 counts in float32",
)


def arange_start(start: Any, end: Any, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
    """aten::arange.start."""
    if dtype == -1 and any(isinstance(number, float) or (isinstance(number, ir.Value) and _is_float(number)) for number in (start, end)):
        dtype = int(tensor_adapters.from_torch_dtype(torch.get_default_dtype()))
    return arange_step(start, end, 1, dtype) if dtype == ir.DataType.DOUBLE else aten_arange_start(start, end, dtype)


def arange_step(start: Any, end: Any, step: Any = 1, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
    """aten::arange.start_step."""
    if dtype != ir.DataType.DOUBLE:
        return aten_arange_start_step(start, end, step, dtype)
    return op.Range(*(_wide(number) for number in (start, end, step)))


def arange_end(end: Any, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
    """aten::arange."""
    return arange_step(0, end, 1, dtype) if dtype == ir.DataType.DOUBLE else aten_arange(end, dtype)


def _wide(number: Any) -> Any:
    if isinstance(number, ir.Value):
        return op.Cast(number, to=ir.DataType.DOUBLE)
    return constant(float(number), ir.DataType.DOUBLE)


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()
