"""Scatters of half types that add, in the type that onnxruntime has them in."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.graph.peepholes import is_reduction_of_halves
from symbolics.graph.values import attr, dtype_of
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "scatter_halves_in_float"]

QUIRK = Quirk(
    cure="symbolics/quirks/onnxruntime/half_scatters.py, and the scatters in symbolics/graph/peepholes.py",
    upstream="onnxruntime",
    seen="1.31.1",
    wrong="ScatterND and ScatterElements with a reduction have no kernel for float16 and bfloat16",
)


def scatter_halves_in_float(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Cast what is scattered to float32, and the result back. (Gradients are written so from the start.)"""
    changed = False
    for node in nodes:
        if node.op_type not in ("ScatterND", "ScatterElements") or node.domain or node.graph is None:
            continue
        data, indices, updates = node.inputs
        if data is None or updates is None or not is_reduction_of_halves(data, attr(node, "reduction")):
            continue
        half = node.outputs[0]
        wide = [_cast(value, ir.DataType.FLOAT, f"{half.name}/{name}") for value, name in ((data, "data"), (updates, "updates"))]
        scatter = ir.Node("", node.op_type, [wide[0].outputs[0], indices, wide[1].outputs[0]], node.attributes.values(), name=node.name)
        scatter.outputs[0].name, scatter.outputs[0].shape = f"{half.name}/wide", half.shape
        scatter.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        scatter.metadata_props.update(node.metadata_props)
        back = _cast(scatter.outputs[0], dtype_of(data), f"{half.name}/narrow")
        node.graph.insert_before(node, [*wide, scatter, back])
        half.replace_all_uses_with(back.outputs[0], replace_graph_outputs=True)
        name = half.name
        node.graph.remove(node, safe=True)
        back.outputs[0].name, back.outputs[0].shape = name, half.shape
        changed = True
    return changed


def _cast(value: ir.Value, dtype: ir.DataType, name: str) -> ir.Node:
    node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", dtype)], name=name)
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, ir.TensorType(dtype), value.shape
    return node
