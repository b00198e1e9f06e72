"""Residuals: outputs of a forward node that nobody asked for and its backward reads."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.graph.builder import Builder

__all__ = ["residual"]


def residual(op: Builder, node: ir.Node, index: int, stem: str, dtype: ir.DataType, shape: ir.Shape | None) -> ir.Value:
    """Output ``index`` of a forward node, with a name made of ``stem`` where it had none: from now on the node makes it.

    The name follows from what else the node makes: two builds with other rules for other nodes give out the same residuals, and what a
    gradient of a gradient reads is what the first one has left.
    """
    if len(node.outputs) <= index:
        node.resize_outputs(index + 1)
    out = node.outputs[index]
    out.name = out.name or op.scope.residual_name(stem, node)
    out.type, out.shape = ir.TensorType(dtype), shape
    return out
