"""arange with numbers of which one is a float."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from onnxscript.function_libs.torch_lib.ops.core import aten_arange_start

from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "arange_start"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib",
    seen="0.7.2",
    wrong="arange(0, 3.5) is of integers: the first number alone says the type",
)


def arange_start(start: Any, end: Any, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
    """aten::arange.start."""
    if dtype == -1 and any(isinstance(number, float) or (isinstance(number, ir.Value) and _is_float(number)) for number in (start, end)):
        dtype = int(tensor_adapters.from_torch_dtype(torch.get_default_dtype()))
    return aten_arange_start(start, end, dtype)


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()
