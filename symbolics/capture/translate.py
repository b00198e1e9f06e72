"""The translation of the opaque operators to ONNX (dynamo=True), and those that replace torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from symbolics import torch_private as private
from symbolics.capture.opaque_op import record_of
from symbolics.node.attributes import ir_attributes
from symbolics.node.names import MARK_DOMAIN, MARK_OP, ORT_DOMAIN, PYTHON_OP
from symbolics.quirks.batch_norm import batch_norm_translations
from symbolics.quirks.cross_entropy import cross_entropy_translations
from symbolics.quirks.floor_divide import floor_divide_translations

__all__ = ["translations"]


def _translate_call(inputs: Sequence[ir.Value | None], sizes: Sequence[Any], key: str) -> Sequence[ir.Value]:
    record = record_of(key)
    tensors, dims = iter(inputs), iter(sizes)
    operands = [_size_value(next(dims)) if slot.kind == "size" else next(tensors) for slot in record.slots]
    node = ir.Node(ORT_DOMAIN, PYTHON_OP, operands, ir_attributes(record.attributes), num_outputs=1 + len(record.outputs.tensors))
    private.add_traced_node(node)
    return node.outputs


def _size_value(size: Any) -> ir.Value:
    if isinstance(size, ir.Value):
        return size
    constant = ir.Node("", "Constant", [], [ir.AttrInt64("value_int", int(size))])
    private.add_traced_node(constant)
    return constant.outputs[0]


def _translate_stop(x: ir.Value) -> ir.Value:
    node = ir.Node(MARK_DOMAIN, MARK_OP, [x])
    private.add_traced_node(node)
    return node.outputs[0]


def translations() -> dict[Any, Any]:
    """The entries for torch.onnx.export's ``custom_translation_table``."""
    return {
        torch.ops.pythonop.call.default: _translate_call,
        torch.ops.pythonop.stop_gradient.default: _translate_stop,
        **batch_norm_translations(),
        **cross_entropy_translations(),
        **floor_divide_translations(),
    }
