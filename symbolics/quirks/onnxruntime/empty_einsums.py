"""Einsum over operands without elements."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.graph.einsum import axes_in_order
from symbolics.graph.values import attr, static_shape
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "einsums_of_nothing"]

QUIRK = Quirk(
    upstream="onnxruntime",
    seen="1.31.1",
    wrong="Einsum transposes an operand whose axes are not in the order in which the letters come first (bhqd,bhkd->bhqk); where that has no element, "
    "an empty batch, the process ends",
)


def einsums_of_nothing(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Transpose such operands before an Einsum where they may have no element."""
    changed = False
    for node in nodes:
        if (node.domain, node.op_type) != ("", "Einsum") or node.graph is None:
            continue
        left, arrow, right = attr(node, "equation", "").replace(" ", "").partition("->")
        terms = left.split(",")
        if "." in left or len(terms) != len(node.inputs):
            continue
        for place, (x, axes) in enumerate(zip(node.inputs, axes_in_order(terms))):
            if (
                x is None
                or axes == sorted(axes)
                or (x.shape is not None and len(x.shape) != len(axes))
                or 0 not in (static_shape(x) or (0,))
            ):
                continue
            turn = ir.Node("", "Transpose", [x], [ir.AttrInt64s("perm", axes)], name=f"{node.outputs[0].name}/in_order_{place}")
            turned = turn.outputs[0]
            turned.name, turned.type = turn.name, x.type
            turned.shape = None if x.shape is None else ir.Shape([x.shape[axis] for axis in axes])
            node.graph.insert_before(node, turn)
            node.replace_input_with(place, turned)
            terms[place] = "".join(terms[place][axis] for axis in axes)
            changed = True
        if ",".join(terms) != left:
            node.attributes["equation"] = ir.AttrString("equation", f"{','.join(terms)}{arrow}{right}")
    return changed
