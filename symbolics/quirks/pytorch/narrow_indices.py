"""Indices in int32, which torch takes everywhere, for the operators of ONNX that take int64 alone."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "widen_indices"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="indices in int32 are given to GatherND and ScatterND as they are, also those that torch's own decompositions make (of unfold's backward)",
)

_NARROW = (ir.DataType.INT32, ir.DataType.INT16, ir.DataType.INT8, ir.DataType.UINT8)
_ARRANGING = (
    "Unsqueeze",
    "Squeeze",
    "Reshape",
    "Transpose",
    "Expand",
    "Concat",
    "Identity",
    "Where",
    "Gather",
    "Slice",
    "Add",
    "Mul",
    "Sub",
    "Mod",
)


def widen_indices(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Cast the indices of each GatherND and ScatterND to int64."""
    changed = False
    for node in nodes:
        if node.op_type not in ("GatherND", "ScatterND") or node.domain or node.graph is None:
            continue
        indices = node.inputs[1]
        if indices is None or _dtype_of(indices) not in _NARROW:
            continue
        name = f"{node.outputs[0].name}/indices"
        cast = ir.Node("", "Cast", [indices], [ir.AttrInt64("to", ir.DataType.INT64)], name=name)
        cast.outputs[0].name, cast.outputs[0].type, cast.outputs[0].shape = name, ir.TensorType(ir.DataType.INT64), indices.shape
        node.graph.insert_before(node, cast)
        node.replace_input_with(1, cast.outputs[0])
        changed = True
    return changed


def _dtype_of(value: ir.Value, depth: int = 0) -> ir.DataType | None:
    """Of a value that no inference has seen, that of what it was arranged from."""
    if value.dtype is not None or depth > 20:
        return value.dtype
    node = value.producer()
    if node is None or node.domain or node.op_type not in _ARRANGING:
        return None
    source = node.inputs[1 if node.op_type == "Where" else 0]
    return None if source is None else _dtype_of(source, depth + 1)
