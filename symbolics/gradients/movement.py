"""Operators that reshape, cut, join, repeat or reorder elements.

What only moves elements has one rule (`_move`): run it on the element numbers, and add the gradient back where they went.
The rules beside it are the cheaper forms of common cases.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from symbolics.gradients.registry import gradient
from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, is_float, static_shape

__all__ = ["gather_adjoint"]


def _move(op: Builder, node: ir.Node, g: ir.Value, *, unique: bool = False, first: int = 0) -> list[ir.Value | None]:
    """The gradient of a movement of input 0: the same node on element numbers says where each came from."""
    x = node.inputs[0]
    attributes = dict(node.attributes)
    numbers = op.node(node.op_type, [op.numbers(x), *node.inputs[1:]], outputs=len(node.outputs), domain=node.domain, **attributes)
    numbers = numbers if isinstance(numbers, ir.Value) else numbers[first]
    return [op.scatter_numbers(g, numbers, x, unique=unique)] + [None] * (len(node.inputs) - 1)


# ----------------------------------------------------------------------------------------------------------- shapes
@gradient("Reshape", "Flatten")
def reshape(op, node, g):
    return [op.reshape_like(g, node.inputs[0]), None][: len(node.inputs)]


@gradient("Squeeze")
def squeeze(op, node, g):
    x, axes = [*node.inputs, None][:2]
    return [op.reshape_like(g, x) if axes is None else op.Unsqueeze(g, axes), None][: len(node.inputs)]


@gradient("Unsqueeze")
def unsqueeze(op, node, g):
    return [op.Squeeze(g, node.inputs[1]), None]


@gradient("Transpose")
def transpose(op, node, g):
    perm = attr(node, "perm")
    return [op.Transpose(g) if perm is None else op.transpose(g, [int(i) for i in np.argsort(perm)])]


@gradient("Expand")
def expand(op, node, g):
    return [op.sum_to(g, node.inputs[0], node.outputs[0]), None]


@gradient("Tile")
def tile(op, node, g):
    x, repeats = node.inputs
    rank, counts = op.rank(node, x), op.ints(repeats)
    if counts is not None and all(n == 1 for n in counts):
        return [g, None]
    if counts is not None and static_shape(x) is not None:
        shape = op.i64([d for pair in zip(counts, static_shape(x)) for d in pair])
    else:
        shape = op.Reshape(op.Concat(op.Unsqueeze(repeats, [1]), op.Unsqueeze(op.shape(x), [1]), axis=1), [-1])
    return [op.ReduceSum(op.Reshape(g, shape), list(range(0, 2 * rank, 2)), keepdims=0), None]


# ---------------------------------------------------------------------------------------------------- join and cut
@gradient("Concat")
def concat(op, node, g):
    axis = attr(node, "axis")
    if len(node.inputs) == 1:
        return [g]
    return list(op.Split(g, op.vector([op.dim(x, axis % op.rank(node, x)) for x in node.inputs]), axis=axis, outputs=len(node.inputs)))


@gradient("Split")
def split(op, node, *gradients):
    parts = [g if g is not None else op.zeros_like(y) for g, y in zip(gradients, node.outputs)]
    return [op.concat(parts, attr(node, "axis", 0)), None][: len(node.inputs)]


@gradient("Slice")
def slice_(op, node, g):
    """Steps of 1: the gradient with zeros before and after. Anything else moves."""
    x, starts, ends, axes, steps = [*node.inputs, None, None][:5]
    none = [None] * (len(node.inputs) - 1)
    start, step, axis = op.ints(starts), op.ints(steps), op.ints(axes)
    if start is None or (steps is not None and step is None) or (axes is not None and axis is None) or any(s != 1 for s in step or ()):
        return _move(op, node, g, unique=True)
    axis = list(range(len(start))) if axis is None else axis
    if x.shape is None:
        return _move(op, node, g, unique=True)
    before: list[int | ir.Value] = []
    after: list[int | ir.Value] = []
    for a, s in zip(axis, start):
        d, n, a = op.dim(x, a), op.dim(node.outputs[0], a), a % len(x.shape)
        if isinstance(d, int):
            b: int | ir.Value = min(max(s + d if s < 0 else s, 0), d)
        else:
            b = s if s >= 0 else op.Max(op.Add(d, op.i64(s)), op.i64(0))
        before.append(b)
        after.append(d - b - n if all(isinstance(v, int) for v in (d, b, n)) else _minus(op, d, b, n))
    return [op.pad(g, before, after, axis), *none]


def _minus(op: Builder, *terms: int | ir.Value) -> ir.Value:
    """The first term less the others, zeros left out."""
    values = [op.i64([t]) if isinstance(t, int) else t for t in terms if not (isinstance(t, int) and t == 0)]
    out = values[0]
    for v in values[1:]:
        out = op.Sub(out, v)
    return out


@gradient("Pad")
def pad(op, node, g):
    """Cut off what was added. A border that repeats elements moves."""
    x, pads, value, axes = [*node.inputs, None, None][:4]
    if attr(node, "mode", "constant") != "constant":
        return _move(op, node, g)
    amounts = op.ints(pads)
    places = range(op.rank(node, x)) if axes is None else op.ints(axes)
    if amounts is not None and places is not None:
        less = [-a for a in amounts]
        dx = op.pad(g, less[: len(less) // 2], less[len(less) // 2 :], places)
    else:
        dx = op.Pad(g, op.Neg(pads), None, axes)
    dvalue = None
    if is_float(value) and op.const(value) is None:
        dvalue = op.reshape_like(op.ReduceSum(g, keepdims=0) - op.ReduceSum(dx, keepdims=0), value)
    return [dx, None, dvalue, None][: len(node.inputs)]


@gradient("Trilu")
def trilu(op, node, g):
    return [op.Trilu(g, *node.inputs[1:], upper=attr(node, "upper", 1)), None][: len(node.inputs)]


@gradient("CenterCropPad")
def center_crop_pad(op, node, g):
    """Its own adjoint: crop what was padded, pad what was cropped."""
    x, axes = node.inputs[0], attr(node, "axes")
    target = op.shape(x) if axes is None else op.vector([op.dim(x, a) for a in axes])
    return [op.node("CenterCropPad", [g, target], axes=axes), None]


# ------------------------------------------------------------------------------------------------------------ gather
def gather_adjoint(op: Builder, g: ir.Value, x: ir.Value, indices: ir.Value, axis: int, rank: int, index_rank: int) -> ir.Value:
    """Add the slices of g, as Gather(x, indices, axis) made them, back into a zero x."""
    axis %= rank
    if axis == 0:
        return op.ScatterND(op.zeros_like(x), op.Unsqueeze(indices, [-1]), g, reduction="add")
    # bring the gathered axes of g, and the axis of x, to the front
    front = list(range(axis, axis + index_rank))
    g = op.Transpose(g, perm=[*front, *[i for i in range(rank - 1 + index_rank) if i not in front]])
    perm = [axis, *[i for i in range(rank) if i != axis]]
    zeros = op.zeros(op.vector([op.dim(x, i) for i in perm]), g.dtype)
    out = op.ScatterND(zeros, op.Unsqueeze(indices, [-1]), g, reduction="add")
    return op.Transpose(out, perm=[int(i) for i in np.argsort(perm)])


@gradient("Gather")
def gather(op, node, g):
    x, indices = node.inputs
    axis, rank, index_rank = attr(node, "axis", 0), op.rank(node, x), op.rank(node, indices)
    index, d = op.const(indices), x.shape[axis]
    if index is not None and index.size == 1 and type(d) is int:  # x[:, i]: zeros around
        i = int(index.reshape(())) % d
        g = op.Unsqueeze(g, [axis % rank]) if index_rank == 0 else g
        return (
            [op.Pad(g, [i, d - 1 - i], None, [axis]) if d > 1 else g, None]
            if index_rank <= 1
            else [gather_adjoint(op, g, x, indices, axis, rank, index_rank), None]
        )
    return [gather_adjoint(op, g, x, indices, axis, rank, index_rank), None]


@gradient("GatherElements")
def gather_elements(op, node, g):
    x, indices = node.inputs
    return [op.ScatterElements(op.zeros_like(x), indices, g, axis=attr(node, "axis", 0), reduction="add"), None]


@gradient("GatherND")
def gather_nd(op, node, g):
    x, indices = node.inputs
    if attr(node, "batch_dims", 0):
        return _move(op, node, g)
    return [op.ScatterND(op.zeros_like(x), indices, g, reduction="add"), None]


@gradient("Compress")
def compress(op, node, g):
    return _move(op, node, g, unique=True)


@gradient("ReverseSequence")
def reverse_sequence(op, node, g):
    return [op.ReverseSequence(g, node.inputs[1], batch_axis=attr(node, "batch_axis", 1), time_axis=attr(node, "time_axis", 0)), None]


@gradient("TopK")
def top_k(op, node, g, _):
    x, y = node.inputs[0], node.outputs[1]
    if g is None:
        return [None, None]
    return [op.ScatterElements(op.zeros_like(x), y, g, axis=attr(node, "axis", -1)), None]


@gradient("Unique")
def unique(op, node, g, *_):
    """The first of equal elements gets the gradient."""
    if g is None:
        return [None]
    x, axis = node.inputs[0], attr(node, "axis")
    if len(node.outputs) < 2:
        node.resize_outputs(2)
    first = node.outputs[1]
    if not first.name:
        first.name = op.scope.name("first")
    first.type, first.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([None])
    if axis is None:
        return [op.scatter_numbers(g, first, x, unique=True)]
    return [gather_adjoint(op, g, x, first, axis, op.rank(node, x), 1)]


# ----------------------------------------------------------------------------------------------------------- scatter
@gradient("ScatterElements", "Scatter")
def scatter_elements(op, node, g):
    axis = attr(node, "axis", 0)
    return _scatter(
        op,
        node,
        g,
        lambda v, i: op.GatherElements(v, i, axis=axis),
        lambda v, i, u, how=None: op.ScatterElements(v, i, u, axis=axis, reduction=how),
    )


@gradient("ScatterND")
def scatter_nd(op, node, g):
    return _scatter(op, node, g, lambda v, i: op.GatherND(v, i), lambda v, i, u, how=None: op.ScatterND(v, i, u, reduction=how))


def _scatter(op, node, g, gather, scatter):
    """``gather(v, indices)`` reads the places that ``scatter(v, indices, updates, reduction)`` writes."""
    data, indices, updates = node.inputs
    y, reduction = node.outputs[0], attr(node, "reduction", "none")
    if reduction == "none":
        return [scatter(g, indices, op.zeros_like(updates)), None, gather(g, indices)]
    if reduction == "add":
        return [g, None, gather(g, indices)]
    if reduction == "mul":
        return [scatter(g, indices, updates, "mul"), None, gather(g * y, indices) / updates]
    # max, min: those that equal the result share evenly, as torch.scatter_reduce does
    kept, won = op.mask(op.Equal(data, y), g), op.mask(op.Equal(updates, gather(y, indices)), g)
    share = g / op.Max(scatter(kept, indices, won, "add"), 1.0)  # no winner: the place is outside
    return [share * kept, None, gather(share, indices) * won]


@gradient("TensorScatter")
def tensor_scatter(op, node, g):
    """Scattered element numbers, from 1, tell where in g each update lies; 0 is the cache."""
    cache, update, *where = node.inputs
    attributes = dict(node.attributes)
    dcache = op.node("TensorScatter", [g, op.zeros_like(update), *where], **attributes)
    blank = op.ConstantOfShape(op.shape(cache), value=ir.tensor(np.zeros(1, np.int64)))
    landed = op.flat(op.node("TensorScatter", [blank, op.Add(op.numbers(update), op.i64(1)), *where], **attributes))
    size = op.size(update)
    size = op.i64([size + 1]) if isinstance(size, int) else op.Reshape(op.Add(size, op.i64(1)), [1])
    slots = op.ScatterElements(op.zeros(size, g.dtype), landed, op.flat(g), axis=0, reduction="add")
    return [dcache, op.reshape_like(op.Slice(slots, [1], [np.iinfo(np.int64).max]), update), *[None for _ in where]]


@gradient("OneHot")
def one_hot(op, node, g):
    """values = [off, on]: the sum of g where it is cold, and where it is hot."""
    indices, depth, _ = node.inputs
    hot = op.OneHot(indices, depth, op.constant([0, 1], g.dtype), axis=attr(node, "axis", -1))
    on = op.ReduceSum(g * hot, keepdims=0)
    off = op.ReduceSum(g * (1.0 - hot), keepdims=0)
    return [None, None, op.Concat(op.Unsqueeze(off, [0]), op.Unsqueeze(on, [0]), axis=0)]


# ------------------------------------------------------------------------------------------------- blocks and depth
@gradient("DepthToSpace")
def depth_to_space(op, node, g):
    x, b = node.inputs[0], attr(node, "blocksize")
    if attr(node, "mode", "DCR") == "DCR":
        return [op.SpaceToDepth(g, blocksize=b)]
    c, h, w = (op.dim(x, i) for i in (1, 2, 3))
    g = op.reshape(g, [op.dim(x, 0), -1, h, b, w, b])  # from (n, c, h, i, w, j) to (n, c, i, j, h, w)
    return [op.reshape_like(op.Transpose(g, perm=[0, 1, 3, 5, 2, 4]), x)]


@gradient("SpaceToDepth")
def space_to_depth(op, node, g):
    b = attr(node, "blocksize")
    return [op.DepthToSpace(g, blocksize=b, mode=attr(node, "mode", "DCR"))]
