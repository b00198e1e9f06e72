"""Numbers beside tensors in float64."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.function_libs.torch_lib.ops.core import aten_full, aten_full_like, aten_scalar_tensor

from symbolics.quirks.opset import constant
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "full", "full_like", "scalar_tensor"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="a number that meets a tensor in float64 is written in float32 and cast, with an error of 1e-8 of its size",
)


def _wide(value: Any, dtype: int) -> Any:
    return constant(value, ir.DataType.DOUBLE) if isinstance(value, float) and dtype == ir.DataType.DOUBLE else value


def scalar_tensor(s: Any, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
    """aten::scalar_tensor."""
    return aten_scalar_tensor(_wide(s, dtype), dtype)


def full(size: Any, fill_value: Any, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
    """aten::full."""
    return aten_full(size, _wide(fill_value, dtype), dtype)


def full_like(
    x: ir.Value, fill_value: Any, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False, memory_format: str = ""
) -> Any:
    """aten::full_like."""
    assert x.dtype is not None
    return aten_full_like(x, _wide(fill_value, x.dtype if dtype == -1 else dtype), dtype)
