"""Sums and means over an axis that few numbers follow, in forms that onnxruntime's CPU runs faster.

What is slow: onnxruntime (1.20 to 1.32) sums over axes between others as a product of matrices, one for each element of what stands before them, and each
costs about 85 ns: 13,280 sums of 4 x 4 numbers over their first axis take 1.2 ms. Where an axis of size 1 follows at the end, it does the same with columns.
Vectors and small tensors on nodes and edges of a graph are such sums (x, y, z behind the channels).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from symbolics.graph.builder import Builder
from symbolics.graph.contractions import FLOATS, OPEN, contract_product
from symbolics.graph.shapes import dims_of
from symbolics.graph.values import array_of, attr

__all__ = ["sum_over_few"]

#: Numbers of a matrix up to which adding one by one is quicker than a product of matrices (85 ns a matrix, 1.8 ns a number); and matrices from which it counts.
_FEW, _MANY = 32, 64


def sum_over_few(op: Builder, node: ir.Node) -> ir.Value | None:
    """What a ReduceSum or ReduceMean computes, in a faster form.

    - The sum of a product whose operands are stretched is a MatMul (`contract_product`).
    - Where only axes of size 1 follow, they are summed over as well: the same numbers lie one behind the other.
    - Few numbers are summed one by one: onnxruntime does so where a further axis, of size 1, is summed over, too.

    Args:
        op: Takes the nodes.
        node: The ReduceSum or ReduceMean.

    Returns:
        The value; None where the node should stay: axes that are not known or not side by side, types other than float32 and float64, unknown sizes.
    """
    x = node.inputs[0]
    dims = None if x is None or x.dtype not in FLOATS else dims_of(x)
    axes = None if dims is None else _axes(node, len(dims))
    if x is None or dims is None or not axes:
        return None
    keeps = bool(attr(node, "keepdims"))
    if node.op_type == "ReduceSum" and (found := contract_product(op, x, axes)) is not None:
        return op.Unsqueeze(found, axes) if keeps else found
    last = axes[-1] + 1
    if axes != list(range(axes[0], last)) or last == len(dims):
        return None
    reduced = {"ReduceSum": op.ReduceSum, "ReduceMean": op.ReduceMean}[node.op_type]
    behind = list(range(last, len(dims)))
    if all(dims[axis] == 1 for axis in behind):
        found = reduced(x, [*axes, *behind], keepdims=int(keeps))
        return found if keeps else op.Unsqueeze(found, [axis - len(axes) for axis in behind])
    matrix = [size for size in dims[axes[0] :] if isinstance(size, int)]
    if axes[0] + len(matrix) < len(dims) or not 0 < math.prod(matrix) <= _FEW or _count(dims[: axes[0]]) < _MANY:
        return None
    found = reduced(op.Unsqueeze(x, [len(dims)]), [*axes, len(dims)], keepdims=int(keeps))
    return op.Squeeze(found, [len(dims)]) if keeps else found


def _axes(node: ir.Node, rank: int) -> list[int] | None:
    """The axes over which a reduction goes, none negative, in order; None where they are not known, or are attributes (before opset 18)."""
    array = array_of(node.inputs[1]) if len(node.inputs) > 1 else None
    return sorted({int(axis) % rank for axis in array.reshape(-1)}) if array is not None and rank else None


def _count(dims: Sequence[object]) -> int:
    return math.prod(dim if isinstance(dim, int) else OPEN for dim in dims)
