"""The sums that people write so that gradients pass a rounding: ``x + (q(x) - x).detach()`` is q(x), but for the last bit."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.graph.values import is_mark
from symbolics.graph.walk import walk

__all__ = ["drop_straight_through"]


def drop_straight_through(model: ir.Model) -> None:
    """Put the rounded value in the place of the sum, in place, where a mark says that gradients do not go there."""
    for part in (model.graph, *model.functions.values()):
        for node in list(walk(part)):
            rounded = _rounded(node)
            if rounded is not None:
                node.outputs[0].replace_all_uses_with(rounded, replace_graph_outputs=False)


def _rounded(node: ir.Node) -> ir.Value | None:
    """q of ``x + mark(q - x)``, or of ``(x + mark(q)) - mark(x)``; None for any other node."""
    if node.domain or node.outputs[0].is_graph_output():
        return None
    if node.op_type == "Add":
        for x, other in (tuple(node.inputs), tuple(reversed(node.inputs))):
            difference = _made_by(_marked(other), "Sub")
            if difference is not None and difference.inputs[1] is x:
                return difference.inputs[0]
    if node.op_type == "Sub":
        total, x = _made_by(node.inputs[0], "Add"), _marked(node.inputs[1])
        if total is not None and x is not None and x in total.inputs:
            return _marked(total.inputs[1] if total.inputs[0] is x else total.inputs[0])
    return None


def _marked(value: ir.Value | None) -> ir.Value | None:
    """What a mark hands on."""
    node = None if value is None else value.producer()
    return node.inputs[0] if node is not None and is_mark(node) else None


def _made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and not node.domain and node.op_type == op_type else None
