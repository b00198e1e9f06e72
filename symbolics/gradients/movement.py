"""Operators that reshape, cut, join, repeat or reorder elements.

What only moves elements has one rule (`_move`): run it on the element numbers, and add the gradient back where they went.
The rules beside it are the cheaper forms of common cases.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from symbolics.gradients.registry import Grads, Ints, RuleFunction, formulas, gradient
from symbolics.gradients.residuals import residual
from symbolics.gradients.windows import Amount, Dim
from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, dtype_of, fixed_array, made_by, may_be_float, static_shape
from symbolics.node.names import ADD_ROWS, ROWS_DOMAIN

__all__ = ["gather_adjoint"]


def _move(op: Builder, node: ir.Node, g: Value, x: Value, *, unique: bool = False) -> Value:
    """The gradient of a movement of input 0: the same node on element numbers says where each came from."""
    numbers = getattr(op, node.op_type)(op.numbers(x), *node.inputs[1:], **node.attributes)
    return op.scatter_numbers(g, numbers, x, unique=unique)


def _vector(op: Builder, axes: Value) -> Value | list[int]:
    """Constant axes as a vector: torch writes a scalar for one axis, which onnxruntime's Unsqueeze takes and its Squeeze does not."""
    return axes if axes.shape is not None and len(axes.shape) == 1 else op.ints(axes) or []


_LINES: dict[str, RuleFunction] = {
    "Reshape": lambda op, g, x: op.reshape_like(g, x),
    "Flatten": lambda op, g, x: op.reshape_like(g, x),
    "Squeeze": lambda op, g, x, axes: op.Unsqueeze(g, _vector(op, axes)) if axes is not None and op.ints(axes) else op.reshape_like(g, x),
    "Unsqueeze": lambda op, g, x, axes: op.Squeeze(g, _vector(op, axes)) if op.ints(axes) else op.reshape_like(g, x),
    "Expand": lambda op, g, x, *, y: op.sum_to(g, x, y),
    "Transpose": lambda op, g, x, *, perm: op.Transpose(g) if perm is None else op.Transpose(g, perm=[int(i) for i in np.argsort(perm)]),
    "Split": lambda op, gs, x, *, ys, axis: op.Concat(*[op.zeros_like(y) if g is None else g for g, y in zip(gs, ys)], axis=axis),
    "Trilu": lambda op, g, x, *k, upper: op.Trilu(g, *k, upper=upper),
    "ReverseSequence": lambda op, g, x, ends, *, batch_axis, time_axis: op.ReverseSequence(g, ends, batch_axis=batch_axis, time_axis=time_axis),
    "GatherElements": lambda op, g, x, i, *, axis: op.ScatterElements(op.zeros_like(x), i, g, axis=axis, reduction="add"),
    "TopK": lambda op, g, x, *, ys, axis: op.ScatterElements(op.zeros_like(x), ys[1], g, axis=axis),
    "Compress": lambda op, g, x, *, node: _move(op, node, g, x, unique=True),
    "SpaceToDepth": lambda op, g, x, *, blocksize, mode: op.DepthToSpace(g, blocksize=blocksize, mode=mode or "DCR"),
}  # fmt: skip
formulas(_LINES)


@gradient("Tile")
def tile(op: Builder, g: Value, x: Value, repeats: Value, *, node: ir.Node) -> Value:
    rank, counts, dims = op.rank(node, x), op.ints(repeats), static_shape(x)
    if counts is not None and all(n == 1 for n in counts):
        return g
    if counts is not None and dims is not None:
        shape = op.i64([d for pair in zip(counts, dims) for d in pair])
    else:
        shape = op.Reshape(op.Concat(op.Unsqueeze(repeats, [1]), op.Unsqueeze(op.Shape(x), [1]), axis=1), [-1])
    return op.ReduceSum(op.Reshape(g, shape, allowzero=1), list(range(0, 2 * rank, 2)), keepdims=0)


# ---------------------------------------------------------------------------------------------------- join and cut
@gradient("Concat")
def concat(op: Builder, g: Value, *xs: Value, axis: int) -> Grads:
    if len(xs) == 1:
        return g
    return op.Split(g, op.vector([op.dim(x, axis) for x in xs]), axis=axis, outputs=len(xs))


@gradient("Slice")
def slice_(
    op: Builder, g: Value, x: Value, starts: Value, ends: Value, axes: Value | None, steps: Value | None, *, y: Value, node: ir.Node
) -> Value:
    """Steps of 1: the gradient with zeros before and after. Anything else moves."""
    start, step = op.ints(starts), [] if steps is None else op.ints(steps)
    axis = range(len(start or ())) if axes is None else op.ints(axes)
    if start is None or axis is None or step is None or any(s != 1 for s in step) or x.shape is None:
        return _move(op, node, g, x, unique=True)
    before: list[Dim] = []
    after: list[Dim] = []
    for a, s in zip(axis, start):
        d, n = op.dim(x, a), op.dim(y, a)
        if isinstance(d, int):
            b: Dim = min(max(s + d if s < 0 else s, 0), d)
        else:
            b = s if s >= 0 else op.Max(op.Add(d, op.i64(s)), op.i64(0))
        before.append(b)
        after.append((Amount.of(op, d) - b - n).dim)
    return op.padded(g, before, after, axis, len(x.shape))


@gradient("Pad")
def pad(op: Builder, g: Value, x: Value, pads: Value, value: Value | None, axes: Value | None, *, node: ir.Node, mode: str) -> Grads:
    """Cut off what was added. A border that repeats elements moves."""
    if mode != "constant":
        return _move(op, node, g, x)
    amounts = op.ints(pads)
    rank, less = op.rank(node, x), op.Neg(pads)
    places = range(rank) if axes is None else op.ints(axes)
    if amounts is not None and places is not None:
        half = len(amounts) // 2
        dx = op.padded(g, [-a for a in amounts[:half]], [-a for a in amounts[half:]], places, rank)
    elif axes is None or places is None:
        dx = op.Pad(g, less, None, axes)
    else:
        each = [op.Slice(less, [i], [i + 1]) for i in range(2 * len(places))]
        dx = op.padded(g, each[: len(places)], each[len(places) :], places, rank)
    dvalue = None
    if value is not None and may_be_float(value) and op.const(value) is None:
        dvalue = op.reshape_like(op.ReduceSum(g, keepdims=0) - op.ReduceSum(dx, keepdims=0), value)
    return [dx, None, dvalue]


@gradient("CenterCropPad")
def center_crop_pad(op: Builder, g: Value, x: Value, *, axes: Ints) -> Value:
    """Its own adjoint: crop what was padded, pad what was cropped."""
    return op.CenterCropPad(g, op.Shape(x) if axes is None else op.vector([op.dim(x, a) for a in axes]), axes=axes)


# ------------------------------------------------------------------------------------------------------------ gather
def gather_adjoint(op: Builder, g: Value, x: Value, indices: Value, axis: int, rank: int, index_rank: int) -> Value:
    """Add the slices of g, as Gather(x, indices, axis) made them, back into a zero x."""
    axis %= rank
    places = op.Unsqueeze(op.Cast(indices, to=ir.DataType.INT64), [-1])  # ScatterND takes no other
    places.shape = None if indices.shape is None else ir.Shape([*indices.shape, 1])
    if axis == 0:
        if g.shape is None and places.shape is not None and x.shape is not None:
            g.shape = ir.Shape([*places.shape[:-1], *x.shape[1:]])
        return op.ScatterND(op.zeros_like(x), places, g, reduction="add")
    # bring the gathered axes of g, and the axis of x, to the front
    front = list(range(axis, axis + index_rank))
    g = op.Transpose(g, perm=[*front, *[i for i in range(rank - 1 + index_rank) if i not in front]])
    perm = [axis, *[i for i in range(rank) if i != axis]]
    zeros = op.zeros(op.vector([op.dim(x, i) for i in perm]), dtype_of(g))
    out = op.ScatterND(zeros, places, g, reduction="add")
    return op.Transpose(out, perm=[int(i) for i in np.argsort(perm)])


@gradient("Gather")
def gather(op: Builder, g: Value, x: Value, indices: Value, *, node: ir.Node, axis: int) -> Value:
    rank, index_rank = op.rank(node, x), op.rank(node, indices)
    index, d = op.const(indices), op.dim(x, axis)
    if index is not None and index.size == 1 and index_rank <= 1 and isinstance(d, int):  # x[:, i]: zeros around
        i = int(index.reshape(())) % d
        g = op.Unsqueeze(g, [axis % rank]) if index_rank == 0 else g
        return op.padded(g, [i], [d - 1 - i], [axis], rank) if d > 1 else g
    return gather_adjoint(op, g, x, indices, axis, rank, index_rank)


@gradient("GatherND")
def gather_nd(op: Builder, g: Value, x: Value, indices: Value, *, node: ir.Node, batch_dims: int) -> Value:
    return _move(op, node, g, x) if batch_dims else op.ScatterND(op.zeros_like(x), indices, g, reduction="add")


@gradient("Unique")
def unique(op: Builder, g: Value, x: Value, *, node: ir.Node, axis: int | None) -> Value:
    """The first of equal elements gets the gradient."""
    first = residual(op, node, 1, "first", ir.DataType.INT64, ir.Shape([None]))
    if axis is None:
        return op.scatter_numbers(g, first, x, unique=True)
    return gather_adjoint(op, g, x, first, axis, op.rank(node, x), 1)


# ----------------------------------------------------------------------------------------------------------- scatter
@gradient("ScatterElements", "Scatter")
def scatter_elements(
    op: Builder, g: Value, data: Value, indices: Value, updates: Value, *, y: Value, axis: int, reduction: str | None
) -> Grads:
    def read(v: Value) -> Value:
        return op.GatherElements(v, indices, axis=axis)

    def write(v: Value, u: Value, how: str | None = None) -> Value:
        return op.ScatterElements(v, indices, u, axis=axis, reduction=how)

    return _scatter(op, g, data, indices, updates, y, reduction or "none", read, write)


@gradient(ADD_ROWS, domain=ROWS_DOMAIN)
def add_rows(op: Builder, g: Value, data: Value, index: Value, updates: Value) -> Grads:
    return [g, None, op.Gather(g, index, axis=0)]


@gradient("ScatterND")
def scatter_nd(op: Builder, g: Value, data: Value, indices: Value, updates: Value, *, y: Value, reduction: str) -> Grads:
    def read(v: Value) -> Value:
        return op.GatherND(v, indices)

    def write(v: Value, u: Value, how: str | None = None) -> Value:
        return op.ScatterND(v, indices, u, reduction=how)

    return _scatter(op, g, data, indices, updates, y, reduction, read, write)


def _scatter(
    op: Builder,
    g: Value,
    data: Value,
    indices: Value,
    updates: Value,
    y: Value,
    reduction: str,
    read: Callable[..., Value],
    write: Callable[..., Value],
) -> Grads:
    """``read(v)`` reads the places that ``write(v, updates, reduction)`` writes."""
    if reduction == "none":
        return [write(g, op.zeros_like(updates)), None, read(g)]
    if reduction == "add":
        return [g, None, read(g)]
    if reduction == "mul":
        # The product of the others, also for an update that is the only zero of its place.
        zero = op.Equal(updates, 0.0)
        filled = op.Where(zero, op.number(1.0, updates), updates)
        single = op.And(zero, op.Equal(read(write(op.zeros_like(data), op.mask(zero, g), "add")), 1.0))
        without = read(g * write(data, filled, "mul"))
        return [write(g, updates, "mul"), None, op.Where(single, without, read(g * y) / filled)]
    # max, min: those that equal the result share evenly, as torch.scatter_reduce does; it counts what lay there before also where that is left out
    kept, won = op.mask(op.Equal(_before(op, data, indices, reduction), y), g), op.mask(op.Equal(updates, read(y)), g)
    share = g / op.Max(write(kept, won, "add"), 1.0)  # no winner: the place is outside
    return [share * kept, None, read(share) * won]


def _before(op: Builder, data: Value, indices: Value, reduction: str) -> Value:
    """What lay where ``include_self=False`` has written the number that changes no maximum (minimum); else the data themselves."""
    node = made_by(data, "ScatterElements")
    if node is None or node.inputs[1] is not indices or attr(node, "reduction") not in (None, "none") or node.inputs[0] is None:
        return data
    filled = fixed_array(node.inputs[2])
    if filled is None and (maker := made_by(node.inputs[2], "ConstantOfShape")) is not None and (value := attr(maker, "value")) is not None:
        filled = value.numpy()
    nothing = -np.inf if reduction == "max" else np.inf
    return node.inputs[0] if filled is not None and bool((filled == nothing).all()) else data


@gradient("TensorScatter")
def tensor_scatter(op: Builder, g: Value, cache: Value, update: Value, *, node: ir.Node) -> Grads:
    """Scattered element numbers, from 1, tell where in g each update lies; 0 is the cache."""
    where = node.inputs[2:]
    dcache = op.TensorScatter(g, op.zeros_like(update), *where, **node.attributes)
    blank = op.ConstantOfShape(op.Shape(cache), value=ir.tensor(np.zeros(1, np.int64)))
    landed = op.flat(op.TensorScatter(blank, op.Add(op.numbers(update), op.i64(1)), *where, **node.attributes))
    length = op.Reshape(op.Add(op.Size(update), op.i64(1)), [1])
    slots = op.ScatterElements(op.zeros(length, dtype_of(g)), landed, op.flat(g), axis=0, reduction="add")
    return [dcache, op.reshape_like(op.Slice(slots, [1], [np.iinfo(np.int64).max]), update)]


@gradient("OneHot")
def one_hot(op: Builder, g: Value, indices: Value, depth: Value, values: Value, *, axis: int) -> Grads:
    """values = [off, on]: the sum of g where it is cold, and where it is hot."""
    hot = op.OneHot(indices, depth, op.constant([0, 1], dtype_of(g)), axis=axis)
    on = op.ReduceSum(g * hot, keepdims=0)
    off = op.ReduceSum(g * (1.0 - hot), keepdims=0)
    return [None, None, op.Concat(op.Unsqueeze(off, [0]), op.Unsqueeze(on, [0]), axis=0)]


# ------------------------------------------------------------------------------------------------- blocks and depth
@gradient("DepthToSpace")
def depth_to_space(op: Builder, g: Value, x: Value, *, blocksize: int, mode: str) -> Value:
    if mode == "DCR":
        return op.SpaceToDepth(g, blocksize=blocksize)
    _, h, w = (op.dim(x, i) for i in (1, 2, 3))
    g = op.Reshape(g, [op.dim(x, 0), -1, h, blocksize, w, blocksize])  # from (n, c, h, i, w, j) to (n, c, i, j, h, w)
    return op.reshape_like(op.Transpose(g, perm=[0, 1, 3, 5, 2, 4]), x)
