"""Sums of rows as products with ones.

The gradient of a bias is the sum of the gradient's rows. onnxruntime's ReduceSum takes 48 us for 256 rows of 256, its product with a row
of ones 7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from exporter.runtime.facts import ShapeAndType, fact_of, fixed_shape
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import attr, fixed_array

__all__ = ["added_axes", "multiply_sums"]

_FEW_ROWS, _FEW_ELEMENTS = 16, 2**14
_MOST_AXES, _MOST_ROWS = 16, 2**20  # the ones are 4 MiB then


def multiply_sums(model: ir.Model, facts: Mapping[ir.Value, ShapeAndType] | None = None) -> int:
    """Replace ReduceSums over all axes but the last in a model for onnxruntime's CPU, where the shapes are known.

    Args:
        model: Changed.
        facts: Shapes and element types of values that do not say it themselves. Where they are wrong, onnxruntime refuses the product.

    Returns:
        How many nodes were replaced.
    """
    scope, made = Scope(free_prefix(model.graph, "sums/"), lambda value: False), 0
    for node in list(model.graph):
        rows = _rows(node, facts or {}) if node.op_type == "ReduceSum" and node.domain == "" else None
        if rows is None:
            continue
        op = Emitter(scope)
        count, rank = rows
        ones = op.constant(np.ones((1, count), np.float32), ir.DataType.FLOAT)
        flat = op.Flatten(node.inputs[0], axis=rank - 1) if rank > 2 else node.inputs[0]  # of other sizes than said, no product is made
        total = op.MatMul(ones, flat)
        keeps = attr(node, "keepdims") != 0
        shaped = total if keeps and rank == 2 else op.Reshape(total, [*(1,) * (rank - 1 if keeps else 0), -1])
        replace(scope, node, op.nodes, [shaped])
        made += 1
    if made:
        scope.register(model.graph)
    return made


def _rows(node: ir.Node, facts: Mapping[ir.Value, ShapeAndType]) -> tuple[int, int] | None:
    """How many rows, and the rank of what is read; None for any other sum, and for few rows."""
    x = node.inputs[0] if node.inputs else None
    sizes = None if x is None or x.const_value is not None else fixed_shape(x, facts)
    if x is None or sizes is None or fact_of(x, facts)[1] is not ir.DataType.FLOAT:
        return None
    rank = len(sizes)
    if rank < 2 or added_axes(node, rank) != list(range(rank - 1)) or not isinstance(attr(node, "keepdims"), int):
        return None
    count = math.prod(sizes[:-1])
    return (count, rank) if _FEW_ROWS <= count <= _MOST_ROWS and count * sizes[-1] >= _FEW_ELEMENTS else None


def added_axes(node: ir.Node, rank: int) -> list[int] | None:
    """The axes, from the front and in their order, that a ReduceSum of a tensor of this rank adds over; None where they are no constant of it."""
    axes = fixed_array(node.inputs[1]) if len(node.inputs) == 2 and len(node.outputs) == 1 else None
    if axes is None or axes.dtype.kind != "i" or axes.size > _MOST_AXES:
        return None
    along = axes.ravel().tolist()
    return sorted(axis % rank for axis in along) if all(-rank <= axis < rank for axis in along) else None
