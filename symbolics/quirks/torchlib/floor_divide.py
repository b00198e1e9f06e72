"""``number // tensor`` for torch.onnx.export(dynamo=True)."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.function_libs.torch_lib.ops.core import aten_floor_divide as torchlibs

from symbolics.quirks.opset import number
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "floor_divide"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib",
    seen="0.7.2",
    wrong="floor_divide fails where the dividend is a number and the divisor a tensor of integers",
)


def floor_divide(dividend: ir.Value | float, divisor: ir.Value | float) -> Any:
    """aten::floor_divide."""
    if not isinstance(dividend, ir.Value) and isinstance(divisor, ir.Value):
        dividend = number(dividend, divisor)
    return torchlibs(dividend, divisor)
