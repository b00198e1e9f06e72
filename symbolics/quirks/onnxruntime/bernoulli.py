"""Draws of 0 and 1."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.graph.values import input_of
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "draw_by_uniforms"]

QUIRK = Quirk(upstream="onnxruntime", seen="1.31.1", wrong="Bernoulli(p) draws 1 with the probability 1 - p")

_WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def draw_by_uniforms(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Write Bernoulli(p) as u < p for a uniform u of [0, 1): in float32 where p is of half a float."""
    changed = False
    for node in nodes:
        if (node.domain, node.op_type) != ("", "Bernoulli") or node.graph is None or (p := input_of(node, 0)) is None:
            continue
        drawn = node.outputs[0]
        wanted = ir.DataType(node.attributes.get_int("dtype", 0) or drawn.dtype or p.dtype or ir.DataType.FLOAT)
        wide = p.dtype if p.dtype in _WIDE else ir.DataType.FLOAT
        chance = p if p.dtype is wide else _before(node, "Cast", [p], wide, to=wide)
        uniform = _before(node, "RandomUniformLike", [chance], wide, dtype=wide, seed=node.attributes.get_float("seed", None))
        below = _before(node, "Less", [uniform, chance], ir.DataType.BOOL)
        node.op_type = "Cast"
        node.resize_inputs(1)
        node.replace_input_with(0, below)
        node.attributes.clear()
        node.attributes.add(ir.AttrInt64("to", wanted))
        changed = True
    return changed


def _before(node: ir.Node, op_type: str, inputs: list[ir.Value], made: ir.DataType, **attributes: float | None) -> ir.Value:
    """What a new node in front of another computes, of the shape of its first input."""
    new = ir.node(op_type, inputs, {name: value for name, value in attributes.items() if value is not None})
    assert node.graph is not None
    node.graph.insert_before(node, new)
    value = new.outputs[0]
    new.name = value.name = f"{node.outputs[0].name}/{op_type}"
    value.type, value.shape = ir.TensorType(made), inputs[0].shape
    return value
