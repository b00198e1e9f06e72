"""Rows added to rows of a tensor, of which several may go to one place: segment sums, gradients of Gather.

What is wrong with the ScatterND that says so: onnxruntime's (1.16 to 1.32) gives the rows to several threads as soon as they have about 210 kB,
and two threads that add to one place lose what one of them added: 836 rows of 2,560 to 64 places were wrong in one run of four with two threads.
ScatterElements adds with one thread, and takes 4 to 10 ns an element. `AddRows` is a function of the file that adds them as follows: each ScatterND
in it writes to a place once. The rows are sorted by where they go; the first of each place is added at once, and the others are added to
each other in pairs, log2 of their number times. docs/figures.md has what each form takes.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from symbolics.graph.builder import Builder
from symbolics.graph.named import function_of
from symbolics.graph.scope import Scope
from symbolics.graph.values import dtype_of, rank_of, static_shape
from symbolics.node.names import ADD_ROWS, ROWS_DOMAIN

__all__ = ["add_rows", "by_elements", "by_one_thread", "function_of_rows", "rows_are_short"]

_ROUNDS = 5  # of halving: 1 + 2**5 rows for one place; what more there are are added one by one
_ONE_THREAD = 2**17  # bytes of rows that onnxruntime never gives to several threads
_SHORT = 64  # elements of a row; fewer are added as soon by ScatterElements


def add_rows(op: Builder, data: ir.Value, index: ir.Value, updates: ir.Value) -> ir.Value:
    """data[index[e]] += updates[e] for all e.

    Args:
        op: Takes the nodes. A model with an `AddRows` among them needs `function_of_rows`.
        data: (places, ...), of a float type of 32 or 64 bits, or an integer one.
        index: int64 (rows); a place from the end where it is negative.
        updates: (rows, ...), of the type of ``data``, and its shape behind the first axis.
    """
    if by_one_thread(data, updates):
        return op.ScatterND(data, op.Unsqueeze(index, [1]), updates, reduction="add")
    if rows_are_short(data):
        return by_elements(op, data, index, updates, "add")
    found: ir.Value = op.node(ADD_ROWS, [data, index, updates], domain=ROWS_DOMAIN)
    found.shape = data.shape
    return found


def by_elements(op: Builder, data: ir.Value, index: ir.Value, updates: ir.Value, reduction: str) -> ir.Value:
    """The same with any reduction, element by element. The rank of ``data`` is known."""
    rank = rank_of(data) or 1
    column = op.Unsqueeze(index, list(range(1, rank))) if rank > 1 else index
    found: ir.Value = op.ScatterElements(data, op.Expand(column, op.Shape(updates)), updates, axis=0, reduction=reduction)
    found.shape = data.shape
    return found


def by_one_thread(data: ir.Value, updates: ir.Value) -> bool:
    """Whether rows are known to be so few that onnxruntime adds them with one thread."""
    shape = static_shape(updates)
    return shape is not None and math.prod(shape) * dtype_of(data).itemsize <= _ONE_THREAD


def rows_are_short(data: ir.Value, axis: int = 0) -> bool:
    """Whether the rows along an axis are known to have so few elements that it is as quick to add these one by one."""
    dims = [] if data.shape is None else [dim for place, dim in enumerate(data.shape) if place != axis]
    known = [dim for dim in dims if isinstance(dim, int)]
    return data.shape is not None and len(known) == len(dims) and math.prod(known) < _SHORT


def function_of_rows(opset: int) -> ir.Function:
    """The body of `AddRows`, for data of any rank.

    Args:
        opset: The model's, 16 or newer.
    """
    scope = Scope("", lambda value: False)
    scope.opset = opset
    inputs = [ir.Value(name=name) for name in ("data", "index", "updates")]
    inputs[1].type = ir.TensorType(ir.DataType.INT64)
    return function_of(scope, ROWS_DOMAIN, ADD_ROWS, inputs, lambda op, given: [_sum(op, *given)])


def _sum(op: Builder, data: ir.Value, index: ir.Value, updates: ir.Value) -> ir.Value:
    index = op.Where(op.Less(index, 0), op.Add(index, op.Shape(data, start=0, end=1)), index)
    count = op.Shape(index)
    places, rows = op.TopK(index, count, axis=0, largest=0, sorted=1, outputs=2)
    before = op.Slice(op.Concat([-1], places, axis=0), [0], [-1])
    first = op.Cast(op.Not(op.Equal(places, before)), to=ir.DataType.INT64)
    starts = _where(op, first)
    number = op.Range(op.i64(0), op.Squeeze(count, [0]), op.i64(1))
    position = op.Sub(number, op.Gather(starts, op.Sub(op.CumSum(first, op.i64(0)), 1)))
    out = _add_once(op, data, op.Gather(places, starts), op.Gather(updates, op.Gather(rows, starts), axis=0))
    rest = _where(op, position)
    places, position, rows = op.Gather(places, rest), op.Sub(op.Gather(position, rest), 1), op.Gather(rows, rest)
    x, taken = updates, rows
    for number_of_round in range(_ROUNDS):
        half = op.Div(position, 2)
        odd = op.Sub(position, op.Mul(half, 2))
        even = op.Sub(1, odd)
        kept, added = _where(op, even), _where(op, odd)
        onto = op.Gather(op.Sub(op.CumSum(even, op.i64(0)), 1), added)
        left, right = (op.Gather(taken, chosen) if number_of_round == 0 else chosen for chosen in (kept, added))
        x = _add_once(op, op.Gather(x, left, axis=0), onto, op.Gather(x, right, axis=0))
        places, position = op.Gather(places, kept), op.Gather(half, kept)
    heads, more = _where(op, op.Cast(op.Equal(position, 0), to=ir.DataType.INT64)), _where(op, position)
    out = _add_once(op, out, op.Gather(places, heads), op.Gather(x, heads, axis=0))
    places, x = op.Gather(places, more), op.Gather(x, more, axis=0)
    ones = op.Expand(op.i64([1]), op.Sub(op.Shape(op.Shape(x)), 1))
    column = op.Reshape(places, op.Concat(op.Shape(places), ones, axis=0))
    return op.ScatterElements(out, op.Expand(column, op.Shape(x)), x, axis=0, reduction="add")


def _where(op: Builder, flags: ir.Value) -> ir.Value:
    """The places of what is not 0, as a vector."""
    return op.Reshape(op.NonZero(flags), [-1])


def _add_once(op: Builder, data: ir.Value, index: ir.Value, updates: ir.Value) -> ir.Value:
    """Add rows, each to a place of its own."""
    return op.ScatterND(data, op.Unsqueeze(index, [1]), updates, reduction="add")
