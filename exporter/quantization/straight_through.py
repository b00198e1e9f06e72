"""The sums that people write so that gradients pass a rounding: ``x + (q(x) - x).detach()`` is q(x), but for the last bit."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.graph.values import is_mark
from symbolics.graph.walk import walk

__all__ = ["drop_straight_through", "hand_on"]


def drop_straight_through(model: ir.Model) -> None:
    """Put the rounded value in the place of the sum, in place, where a mark says that gradients do not go there."""
    for part in (model.graph, *model.functions.values()):
        for node in list(walk(part)):
            rounded = _rounded(node)
            if rounded is not None:
                hand_on(node, rounded)


def hand_on(node: ir.Node, value: ir.Value) -> None:
    """Let the readers of a node read a value instead; where it gives an output of the graph, it hands the value on."""
    for use in list(node.outputs[0].uses()):
        use.node.replace_input_with(use.idx, value)
    node.op_type = "Identity"
    node.attributes.clear()
    node.resize_inputs(1)
    node.replace_input_with(0, value)


def _rounded(node: ir.Node) -> ir.Value | None:
    """q of ``x + mark(q - x)``, of ``(x + mark(q)) - mark(x)``, or of ``q + (x - mark(x))``; None for any other node."""
    if node.domain:
        return None
    if node.op_type == "Add":
        for q, nothing in (tuple(node.inputs), tuple(reversed(node.inputs))):
            if q is not None and _is_nothing(nothing) and _same_shape(q, node.outputs[0]):
                return q
        for x, other in (tuple(node.inputs), tuple(reversed(node.inputs))):
            difference = _made_by(_marked(other), "Sub")
            if difference is not None and difference.inputs[1] is x:
                return difference.inputs[0]
    if node.op_type == "Sub":
        total, x = _made_by(node.inputs[0], "Add"), _marked(node.inputs[1])
        if total is not None and x is not None and x in total.inputs:
            return _marked(total.inputs[1] if total.inputs[0] is x else total.inputs[0])
    return None


def _is_nothing(value: ir.Value | None) -> bool:
    """Whether a value is 0, and there for its gradient alone: ``x - mark(x)``, a part of it, or a multiple."""
    node = None if value is None else value.producer()
    if node is None or node.domain:
        return False
    if node.op_type == "Sub":
        return node.inputs[0] is not None and _marked(node.inputs[1]) is node.inputs[0]
    if node.op_type == "Where":
        _, one, other = node.inputs
        return (_is_nothing(one) and _is_zero(other)) or (_is_zero(one) and _is_nothing(other))
    if node.op_type == "Mul":
        return any(map(_is_nothing, node.inputs))
    return node.op_type in ("Cast", "Identity", "Neg", "Reshape", "Unsqueeze") and _is_nothing(node.inputs[0])


def _is_zero(value: ir.Value | None) -> bool:
    """Whether a value is a constant 0 that nobody trains."""
    node = None if value is None else value.producer()
    if value is not None and node is None:
        return value.const_value is not None and not value.const_value.numpy().any()
    if node is None or node.domain:
        return False
    if node.op_type in ("Constant", "ConstantOfShape"):
        tensor = node.attributes["value"].value if "value" in node.attributes else None
        return not tensor.numpy().any() if isinstance(tensor, ir.TensorProtocol) else node.op_type == "ConstantOfShape"
    return node.op_type in ("Cast", "CastLike", "Expand", "Identity") and _is_zero(node.inputs[0])


def _same_shape(one: ir.Value, other: ir.Value) -> bool:
    return one.shape is None or other.shape is None or len(one.shape) == len(other.shape)


def _marked(value: ir.Value | None) -> ir.Value | None:
    """What a mark hands on."""
    node = None if value is None else value.producer()
    return node.inputs[0] if node is not None and is_mark(node) and node.inputs else None


def _made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and not node.domain and node.op_type == op_type else None
