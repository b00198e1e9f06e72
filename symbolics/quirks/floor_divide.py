"""``number // tensor`` for torch.onnx.export(dynamo=True): torch's translation fails where the dividend is a number."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.function_libs.torch_lib.ops.core import aten_floor_divide

from symbolics import torch_private as private

__all__ = ["floor_divide_translations"]


def _floor_divide(dividend: ir.Value | float, divisor: ir.Value | float) -> Any:
    if isinstance(dividend, ir.Value) or not isinstance(divisor, ir.Value) or divisor.dtype is None:
        return aten_floor_divide(dividend, divisor)
    node = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(np.array(dividend, dtype=divisor.dtype.numpy())))])
    private.add_traced_node(node)
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(divisor.dtype), ir.Shape([])
    return aten_floor_divide(node.outputs[0], divisor)


def floor_divide_translations() -> dict[Any, Any]:
    """The entries for torch.onnx.export's ``custom_translation_table``."""
    return {torch.ops.aten.floor_divide.default: _floor_divide}
