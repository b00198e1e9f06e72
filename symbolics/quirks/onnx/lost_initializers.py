"""Constants that a rewrite of onnxscript lets go of."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "register_lost_initializers"]

QUIRK = Quirk(
    upstream="onnxscript's rewriter",
    seen="0.7.2",
    wrong="a new initializer takes the place of another one of its name, which nodes go on reading: that of a second Clip of one value, or a parameter",
    issue="microsoft/onnxscript#2945",
)


def register_lost_initializers(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Make initializers of constants that belong to no graph, under names of their own."""
    initializers = model.graph.initializers
    taken: set[str | None] = set()
    for value in (value for node in nodes for value in node.inputs if value is not None and value.const_value is not None):
        if value.producer() is not None or value.is_graph_input() or value.is_initializer():
            continue
        taken = taken or {value.name for node in nodes for value in (*node.inputs, *node.outputs) if value is not None}
        base, count = value.name or "constant", 0
        while value.name is None or value.name in initializers:
            count += 1
            if f"{base}_{count}" not in taken:
                value.name = f"{base}_{count}"
        taken.add(value.name)
        initializers[value.name] = value
    return False
