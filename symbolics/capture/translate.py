"""The translation of the opaque operators to ONNX (dynamo=True), and those that replace torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18 as op

from symbolics import torch_private as private
from symbolics.capture.gradient_ops import gradient_attributes, is_edge
from symbolics.capture.opaque_op import record_of
from symbolics.node.attributes import ir_attributes
from symbolics.node.names import BOUNDARY_OP, GRADIENT_OP, INNER_DOMAIN, MARK_DOMAIN, MARK_OP, ORT_DOMAIN, PYTHON_OP, VARIABLE_OP
from symbolics.quirks import translations as mended_translations

__all__ = ["translations"]


def _translate_call(inputs: Sequence[ir.Value | None], sizes: Sequence[Any], key: str) -> Sequence[ir.Value]:
    record = record_of(key)
    tensors, dims = iter(inputs), iter(sizes)
    operands = [_size(next(dims)) if slot.kind == "size" else next(tensors) for slot in record.slots]
    return private.add_traced_node(ORT_DOMAIN, PYTHON_OP, operands, ir_attributes(record.attributes), 1 + len(record.outputs.tensors))


def _size(size: Any) -> ir.Value:
    return size if isinstance(size, ir.Value) else op.Constant(value_int=int(size))  # type: ignore[return-value]


def _translate_stop(x: ir.Value) -> ir.Value:
    return private.add_traced_node(MARK_DOMAIN, MARK_OP, [x])[0]


def _translate_gradient(
    outputs: Sequence[ir.Value], inputs: Sequence[ir.Value], cotangents: Sequence[ir.Value], key: str
) -> Sequence[ir.Value]:
    attributes = gradient_attributes(key, len(outputs))
    return private.add_traced_node(INNER_DOMAIN, GRADIENT_OP, [*outputs, *inputs, *cotangents], attributes, len(inputs))


def _translate_variable(x: ir.Value, key: str) -> ir.Value:
    return private.add_traced_node(INNER_DOMAIN, BOUNDARY_OP if is_edge(key) else VARIABLE_OP, [x], [ir.AttrString("id", key)])[0]


def translations() -> dict[Any, Any]:
    """The entries for torch.onnx.export's ``custom_translation_table``."""
    return {
        torch.ops.pythonop.call.default: _translate_call,
        torch.ops.pythonop.stop_gradient.default: _translate_stop,
        torch.ops.pythonop.gradient.default: _translate_gradient,
        torch.ops.pythonop.variable.default: _translate_variable,
        **mended_translations(),
    }
