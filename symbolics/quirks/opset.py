"""What a translation is written with: onnxscript's operators, and numbers."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript import opset18

from symbolics import torch_private as private
from symbolics.node.names import MARK_DOMAIN, MARK_OP

__all__ = ["constant", "number", "op", "stopped"]

op: Any = opset18  # inside torch.onnx.export it takes lists of ints as well, which its types do not say


def number(value: float | ir.Value, like: ir.Value) -> Any:
    """A scalar of the element type of ``like``, an argument of the translation (torch.onnx knows no other value's type)."""
    assert like.dtype is not None
    return constant(value, like.dtype)


def constant(value: float | ir.Value, dtype: ir.DataType) -> Any:
    """A scalar constant; what is computed from open sizes is a value already."""
    if isinstance(value, ir.Value):
        return op.Cast(value, to=dtype)
    made = op.Constant(value=ir.tensor(value, dtype=dtype))
    made.type, made.shape = ir.TensorType(dtype), ir.Shape([])
    return made


def stopped(x: ir.Value) -> ir.Value:
    """The value, behind a stop-gradient mark."""
    return private.add_traced_node(MARK_DOMAIN, MARK_OP, [x])[0]
