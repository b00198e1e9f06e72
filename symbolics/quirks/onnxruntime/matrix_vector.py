"""A transposed matrix times a vector, in the form that onnxruntime computes right."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.graph.values import input_of
from symbolics.node.names import MARK_DOMAIN, MARK_OP
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "turn_products_with_vectors"]

QUIRK = Quirk(
    upstream="onnxruntime",
    seen="1.31.1",
    wrong="MatMul(Transpose(A), v) of a computed A becomes FusedMatMul(A, v, transA=1), which reads the wrong numbers for a v of rank 1",
)

# What onnxruntime's fusion sees through, or has removed before.
_SEEN_THROUGH = {("", "Identity"), ("", "Cast"), (MARK_DOMAIN, MARK_OP)}


def turn_products_with_vectors(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Write MatMul(Transpose(A), v) as MatMul(v, A): that, and a matrix of one column, onnxruntime computes right."""
    changed = False
    for node in nodes:
        if (node.domain, node.op_type) != ("", "MatMul") or len(node.inputs) != 2 or node.graph is None:
            continue
        a, v = node.inputs
        if a is None or v is None or v.shape is None or len(v.shape) != 1 or (rank := _turned(a)) is None:
            continue
        maker = a.producer()
        if maker is not None and maker.op_type == "Transpose":
            matrix = input_of(maker, 0)
        else:
            turn = ir.Node("", "Transpose", [a], [ir.AttrInt64s("perm", _swap(rank))], name=f"{node.outputs[0].name}/turned")
            node.graph.insert_before(node, turn)
            matrix = turn.outputs[0]
            matrix.name, matrix.type = turn.name, a.type
            matrix.shape = ir.Shape([*a.shape[:-2], a.shape[-1], a.shape[-2]]) if a.shape is not None else None
        node.replace_input_with(0, v)
        node.replace_input_with(1, matrix)
        if maker is not None and maker.graph is not None and maker.op_type == "Transpose" and not a.uses() and not a.is_graph_output():
            maker.graph.remove(maker, safe=True)
        changed = True
    return changed


def _turned(value: ir.Value) -> int | None:
    """The rank of a value that a Transpose of the last two axes made; None for any other."""
    node = value.producer()
    while node is not None and (node.domain, node.op_type) in _SEEN_THROUGH:
        node = source.producer() if (source := input_of(node, 0)) is not None else None
    if node is None or (node.domain, node.op_type) != ("", "Transpose"):
        return None
    source = input_of(node, 0)
    perm = node.attributes.get("perm")
    if perm is None:  # all axes in reverse
        return 2 if source is not None and source.shape is not None and len(source.shape) == 2 else None
    axes = list(perm.as_ints())
    return len(axes) if len(axes) >= 2 and axes == _swap(len(axes)) else None


def _swap(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]
