"""Einsums that stretch an axis of one element along a letter of another operand."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.graph.einsum import apart
from symbolics.graph.values import attr
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "without_stretched_axes"]

QUIRK = Quirk(
    upstream="onnx",
    seen="1.23.2",
    wrong="the inference of shapes gives such an axis one element where the operand with 1 comes first; onnxruntime infers it by that, and "
    "refuses what reads the result (symbolics.graph.pool_sizes has the right sizes for pythonop's own inference)",
)


def without_stretched_axes(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Give such axes letters of their own, which are summed: a sum of one element."""
    for node in nodes:
        equation = attr(node, "equation", None) if node.op_type == "Einsum" and not node.domain else None
        if equation:
            node.attributes["equation"] = ir.AttrString("equation", apart(equation, [None if x is None else x.shape for x in node.inputs]))
    return False
