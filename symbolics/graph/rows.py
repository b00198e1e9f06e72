"""Scatters and gathers of whole rows: `by_rows` writes those over an index of elements so, `in_turn` those that add with several threads.

What is wrong with the first: torch's scatter_add, index_add and gather over an index that was expanded over all other axes (segment sums, messages of
a graph network, MACE's `scatter_sum`) ask for an index for each element. onnxruntime (1.16 to 1.32) reads them one by one, 4 to 10 ns an element of
ScatterElements; Gather and `symbolics.graph.row_sums`, which also says what is wrong with the second, take one index a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from symbolics.graph.builder import Builder
from symbolics.graph.row_sums import add_rows, by_elements, by_one_thread, rows_are_short
from symbolics.graph.shapes import same_dim
from symbolics.graph.values import attr, fixed_array, input_of, made_by, rank_of

__all__ = ["by_rows", "in_turn"]

_LARGEST = 2**22  # elements of a constant index that are compared
_ADDED = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64})


def by_rows(op: Builder, node: ir.Node) -> ir.Value | None:
    """What a ScatterElements or GatherElements computes, row by row.

    Args:
        op: Takes the nodes.
        node: The ScatterElements or GatherElements.

    Returns:
        The value; None where the node should stay: an index that says more than rows, or rows that may be longer than what is written to them.
    """
    data, index, *others = node.inputs
    rank = rank_of(data)
    if data is None or index is None or data.shape is None or rank is None or rank < 2 or rank_of(index) != rank:
        return None
    axis = attr(node, "axis") % rank
    updates = others[0] if others else None
    for place in range(rank):
        ends = [
            value.shape[place] for value in (index, updates) if value is not None and value.shape is not None and len(value.shape) == rank
        ]
        if place != axis and not any(same_dim(data.shape[place], end) for end in ends):
            return None
    vector = _vector(op, index, axis)
    if vector is None:
        return None
    if updates is None:
        return op.Gather(data, vector(index), axis=axis)
    updates = _unsliced(updates, index)
    if attr(node, "reduction", None) != "add" or data.dtype not in _ADDED or rows_are_short(data, axis):
        return None
    index = op.Cast(vector(updates), to=ir.DataType.INT64)
    if axis == 0:
        return add_rows(op, data, index, updates)
    front = [axis, *(place for place in range(rank) if place != axis)]
    found = add_rows(op, op.Transpose(data, perm=front), index, op.Transpose(updates, perm=front))
    return op.Transpose(found, perm=[front.index(place) for place in range(rank)])


def in_turn(op: Builder, node: ir.Node) -> ir.Value | None:
    """What a ScatterND with a reduction computes, as `add_rows` writes it, with which no addition is lost.

    Args:
        op: Takes the nodes.
        node: The ScatterND.

    Returns:
        The value; None where the node should stay: it has no reduction, writes to each place once as far as constants tell, has so few rows that
        one thread writes them, or nothing is known of its shapes.
    """
    data, indices, updates = (input_of(node, index) for index in range(3))
    how = attr(node, "reduction", None)
    if how in (None, "none") or data is None or indices is None or updates is None or data.dtype not in _ADDED:
        return None
    if data.shape is None or not indices.shape or updates.shape is None or not isinstance(depth := indices.shape[-1], int) or depth < 1:
        return None
    known = fixed_array(indices)
    if known is not None and known.size <= _LARGEST:
        sizes = np.array([dim if isinstance(dim, int) else 0 for dim in data.shape[:depth]])
        places = known.reshape(-1, depth)
        if len(np.unique(places + np.where(places < 0, sizes, 0), axis=0)) == len(places) and (sizes > 0).all():
            return None
    if by_one_thread(data, updates):
        return None
    if depth == 1 and len(indices.shape) == 2:
        index = op.Reshape(indices, [-1])
        return add_rows(op, data, index, updates) if how == "add" else by_elements(op, data, index, updates, how)
    index = None
    for axis in range(depth):  # the number of the row among all
        part = op.Gather(indices, op.i64(axis), axis=len(indices.shape) - 1)
        size = op.Shape(data, start=axis, end=axis + 1)
        part = op.Where(op.Less(part, 0), op.Add(part, size), part)
        index = part if index is None else op.Add(op.Mul(index, size), part)
    behind = list(data.shape[depth:])
    rows, index = _flattened(op, data, depth, behind), op.Reshape(index, [-1])
    updates = _flattened(op, updates, len(indices.shape) - 1, behind)
    found = add_rows(op, rows, index, updates) if how == "add" else by_elements(op, rows, index, updates, how)
    return op.reshape_like(found, data)


def _flattened(op: Builder, x: ir.Value, count: int, behind: list[Any]) -> ir.Value:
    """The first axes of a tensor as one."""
    last = op.Shape(x, start=count)
    found = op.Reshape(x, op.Concat(op.ReduceProd(op.Shape(x, start=0, end=count), keepdims=1), last, axis=0), allowzero=1)
    first = [dim for dim in x.shape[:count] if isinstance(dim, int)] if x.shape is not None else []
    found.shape = ir.Shape([math.prod(first) if len(first) == count else None, *behind])
    return found


def _vector(op: Builder, index: ir.Value, axis: int) -> Callable[[ir.Value], ir.Value] | None:
    """What makes the one vector of which each line of an index along an axis is a copy, as long as another value is there."""
    array = fixed_array(index)
    if array is not None:
        if array.size == 0 or array.size > _LARGEST:
            return None
        first: Any = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)[:, :1]
        same = bool((np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1) == first).all())
        return (lambda like: op.constant(first.reshape(-1), ir.DataType.from_numpy(array.dtype))) if same else None
    if (cast := made_by(index, "Cast")) is not None and cast.inputs[0] is not None:
        inner = _vector(op, cast.inputs[0], axis)
        return None if inner is None else lambda like: op.Cast(inner(like), to=attr(cast, "to"))
    expand = made_by(index, "Expand")
    x = None if expand is None else expand.inputs[0]
    if x is None or x.shape is None or index.shape is None:
        return None
    place = axis - (len(index.shape) - len(x.shape))
    if place < 0 or any(dim != 1 for k, dim in enumerate(x.shape) if k != place):
        return None
    flat = _before_unsqueeze(x) or op.Reshape(x, [-1])
    length, whole = x.shape[place], index.shape[axis]

    def vector(like: ir.Value) -> ir.Value:
        if same_dim(length, whole) or (like.shape is not None and same_dim(length, like.shape[axis])):
            return flat
        return op.Expand(flat, op.Shape(like, start=axis, end=axis + 1))

    return vector


def _before_unsqueeze(x: ir.Value) -> ir.Value | None:
    """The vector that x is with axes of one element beside it."""
    node = made_by(x, "Unsqueeze")
    vector = None if node is None else node.inputs[0]
    return vector if rank_of(vector) == 1 else None


def _unsliced(updates: ir.Value, index: ir.Value) -> ir.Value:
    """Updates before TorchScript cuts them to the shape of an index that was itself expanded to theirs."""
    cut, expand = made_by(updates, "Slice"), made_by(index, "Expand")
    if cut is None or expand is None or len(cut.inputs) not in (3, 4) or None in cut.inputs:
        return updates
    source, starts, ends, *axes = cut.inputs
    rank = rank_of(source)
    first, ordered = fixed_array(starts), [fixed_array(each) for each in axes]
    shape_of_index, shape_of_source = made_by(ends, "Shape"), made_by(expand.inputs[1], "Shape")
    whole = (
        rank is not None
        and first is not None
        and not first.any()
        and all(each is not None and each.tolist() == list(range(rank)) for each in ordered)
        and shape_of_index is not None
        and shape_of_index.inputs[0] is index
        and shape_of_source is not None
        and shape_of_source.inputs[0] is source
        and not any(attr(each, name, None) for each in (shape_of_index, shape_of_source) for name in ("start", "end"))
    )
    return source if whole and source is not None else updates
