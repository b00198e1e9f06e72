"""Operators that only move elements become one copy, in memory.

A convolution's gradient lays out what its products read: Transpose, Pad, Gather, Slice, Concat. onnxruntime runs them one by one, most of
them in one thread, and what one core has written the other one then reads, which takes two to five times as long where the cores share no
cache. The native library writes the result of all of them at once, in as many threads as there are. Two forms:

- a value that such operators make of another one, and that anything else reads, is one node Rearrange;
- a gradient for weights by columns (symbolics/gradients/convolution.py), where the kernel's positions are interleaved behind the products. With
  AVX-512 it is one node (exporter/cpu/weights.py). Else it stays products: each column is laid out as a row, in the order of the
  weights, and nothing is interleaved. Where windows move place by place, what the
  first axis of the kernel does is done to the other side: of 3x3 positions, images and gradients are laid out three times each, in place of
  nine times and once, and one product is all. It multiplies zeros with places of the image that no gradient belongs to: of an image that is
  not finite, more positions of the gradient are NaN than the operators' would be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from exporter.cpu.operators import DOMAIN
from exporter.cpu.views import FAR, Axis, View
from exporter.cpu.weights import conv_weight_grad
from exporter.runtime.facts import ShapeAndType, fact_of
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import attr, fixed_array, made_by
from symbolics.graph.walk import remove_operators

__all__ = ["REARRANGE", "move_at_once"]

REARRANGE = "Rearrange"

_MOST_AXES = 16  # as DIMS_MOST in native/elementwise.c
_MOST_BEFORE = 64  # before those that go on are one
_FEW_ELEMENTS, _MANY_ELEMENTS = 2**12, 2**13  # of fewer, onnxruntime's operators cost no more: of several, and of one
_MOST_PLACES = 2**20  # of an index that is looked at
_MOST_WASTE = 1.3  # times as many places: the zeros are multiplied, too
_PRODUCTS = frozenset({"MatMul", "Gemm"})  # they read a matrix either way
_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE}


def move_at_once(model: ir.Model, facts: Mapping[ir.Value, ShapeAndType] | None = None) -> int:
    """Replace what is written above in a model for onnxruntime's CPU with the native library, where the shapes are known.

    Args:
        model: Changed. Its nodes stand in the order of their values.
        facts: Shapes and element types of values that do not say it themselves. They may be wrong: the native library compares the shape
            of what it reads.

    Returns:
        How many nodes were put in.
    """
    found = _Views(model.graph, facts or {}, through=True)
    scope = Scope(free_prefix(model.graph, "moved/"), lambda value: False)
    made = 0
    for node in list(model.graph):
        if node.op_type == "Concat" and node.domain == "" and (parts := found.products_of(node)) is not None:
            op = Emitter(scope)
            rows, columns, results, products = parts
            weights = conv_weight_grad(op, found.of(rows), columns) if found.kind(columns.source) is ir.DataType.FLOAT else None
            if weights is None and columns.is_straight:  # windows that move by more than a place are better read as whole pixels
                weights = _in_weight_order(op, found, rows, columns, results, products)
            if weights is not None:
                replace(scope, node, op.nodes, [weights])
                made += 1
    if made:
        remove_operators(model.graph, _REMOVED_UNREAD)
    found = _Views(model.graph, facts or {})
    now: dict[ir.Value, ir.Value] = {}  # what was replaced -> what stands for it
    for node in list(model.graph):
        view = found.of(node.outputs[0]) if len(node.outputs) == 1 else None
        if view is not None and found.is_worth_it(node, view):
            op, value = Emitter(scope), node.outputs[0]
            moved = now[value] = _moved(op, dataclasses.replace(view, source=now.get(view.source, view.source)), found.kind(view.source))
            shape = moved.shape
            replace(scope, node, op.nodes, [moved])
            moved.shape = shape  # not what the file says of it, which onnxruntime would believe
            made += 1
    if made:
        scope.register(model.graph)
        model.graph.opset_imports[DOMAIN] = 1
        remove_operators(model.graph, _REMOVED_UNREAD)
    return made


def _moved(op: Emitter, view: View, kind: ir.DataType) -> ir.Value:
    """The node that writes a view."""
    axes = view.axes()
    sizes = [-1 if axis.size is None else axis.size for axis in axes]
    lead = max(0, 2 - len(axes))
    steps = [step for dim in range(len(view.dims)) for step in (*(0,) * lead, *(axis.steps[dim] for axis in axes))]
    made: ir.Value = op.node(
        REARRANGE,
        [view.source],
        domain=DOMAIN,
        source=[-1 if dim is None else dim for dim in view.dims],
        starts=list(view.starts),
        sizes=[1] * lead + sizes,
        steps=steps,
        shape=[-1 if size is None else size for size in view.shape],
    )
    made.type = ir.TensorType(kind)
    made.shape = ir.Shape(view.shape)
    return made


def _in_weight_order(op: Emitter, found: _Views, rows: ir.Value, columns: View, results: int, parts: int) -> ir.Value:
    """The gradient for weights (results * channels, positions).

    Args:
        op: Takes the nodes.
        found: What is known of the graph.
        rows: (results, windows).
        columns: (channels, positions, windows).
        results: How many.
        parts: In how many products it is computed, each of some channels: what one reads is to stay in the cache.
    """
    channels, positions, _ = columns.shape
    assert channels and positions
    if (shared := _shared(found.of(rows), columns)) is not None:
        left, right = (_moved(op, view, found.kind(view.source)) for view in shared)
        outer = columns.groups[1][0].size or 1
        product = op.Gemm(left, right, transB=1)
        product.shape = ir.Shape([outer * results, channels * positions // outer])
        apart = op.Reshape(product, [results, outer, channels, positions // outer])
        return op.Reshape(op.Transpose(apart, perm=[0, 2, 1, 3]), [results * channels, positions])
    parts = next(part for part in range(parts, channels + 1) if channels % part == 0)
    each = columns.reshaped([parts, channels // parts * positions, -1])
    if each is None or len(each.groups[0]) != 1:  # channels of several axes, as shuffled ones, that are not parted so
        parts, each = 1, columns.reshaped([1, channels * positions, -1])
    assert each is not None
    kind = found.kind(columns.source)
    products = [
        op.Gemm(rows, _moved(op, dataclasses.replace(v, groups=v.groups[1:]), kind), transB=1)
        for v in ((each.at(0, part) if parts > 1 else each) for part in range(parts))
    ]
    joined = op.Concat(*products, axis=1) if parts > 1 else products[0]
    return op.Reshape(joined, [results * channels, positions])


def _shared(rows: View | None, columns: View) -> tuple[View, View] | None:
    """(results and first axis of the kernel, places) and (channels and the kernel's other axes, places), where windows move place by place
    along that axis; None where they do not, or where too many places are zero.
    """
    channels, positions, windows = columns.groups
    if rows is None or len(rows.groups) != 2 or not positions:
        return None
    results, places = rows.groups
    down, *others = positions
    moving = [k for k, axis in enumerate(windows) if _only(axis, down)]
    if len(moving) != 1 or [axis.size for axis in windows] != [axis.size for axis in places]:
        return None
    (k,) = moving
    window, place = windows[k], places[k]
    along = [dim for dim, step in enumerate(place.steps) if step]
    if len(along) != 1 or max(window.steps) != 1 or place.size is None or down.size is None:
        return None
    (dim,) = along
    alone = not any(axis.steps[dim] for group in rows.groups for axis in group if axis is not place)
    if place.steps[dim] != 1 or rows.starts[dim] or rows.dims[dim] != place.size or not alone:
        return None
    step = max(down.steps)
    height = place.size + (down.size - 1) * step
    if step < 1 or height > _MOST_WASTE * place.size:
        return None
    back = Axis(down.size, tuple(-step if i == dim else 0 for i in range(len(rows.dims))))
    left = dataclasses.replace(rows, groups=((*results, back), (*places[:k], Axis(height, place.steps), *places[k + 1 :])))
    right = dataclasses.replace(columns, groups=((*channels, *others), (*windows[:k], Axis(height, window.steps), *windows[k + 1 :])))
    return left, right


def _only(axis: Axis, other: Axis) -> bool:
    """Whether an axis moves along one dim, the one that the other moves along."""
    return [bool(step) for step in axis.steps] == [bool(step) for step in other.steps] and sum(map(bool, axis.steps)) == 1


class _Views:
    """What the operators of a graph that only move elements make.

    Attributes:
        through: Also through what several read and is read here and there: turned once for all of them, it is better left as it is.
    """

    def __init__(self, graph: ir.Graph, facts: Mapping[ir.Value, ShapeAndType], *, through: bool = False) -> None:
        self.graph = graph
        self.through = through
        self._facts = facts
        self._known: dict[ir.Value, View | None] = {}
        self._turned_of: dict[ir.Value, ir.Value] = {}  # what is turned once for several -> of which value

    def kind(self, value: ir.Value) -> ir.DataType:
        """The element type of a view's tensor."""
        while value in self._turned_of:
            value = self._turned_of[value]
        kind = fact_of(value, self._facts)[1]
        assert kind is not None
        return kind

    def of(self, value: ir.Value | None) -> View | None:
        """A value as a view: of another one where such operators make it, else of itself; None where its shape is not known."""
        if value is None or value.const_value is not None:
            return None
        waiting = [value]
        while waiting:  # without recursion: a chain of operators may be long
            last = waiting[-1]
            if last in self._known:
                waiting.pop()
                continue
            node = last.producer()
            read = [] if node is None or not _may_move(node) else [v for v in _tensors(node) if v is not None and v not in self._known]
            if read and len(waiting) <= len(self.graph) + 1:
                waiting += read
                continue
            waiting.pop()
            self._known[last] = self._made(last)
        return self._known[value]

    def _made(self, value: ir.Value) -> View | None:
        node = value.producer()
        given = [self._as_read(v) for v in _tensors(node)] if node is not None and _may_move(node) else []
        views = [view for view in given if view is not None]
        made = _move(node, views) if node is not None and views and len(views) == len(given) else None
        if made is not None and sum(map(len, made.groups)) <= _MOST_BEFORE:
            return made
        shape, kind = fact_of(value, self._facts)
        if shape is None or kind not in _FLOATS or value.const_value is not None or len(shape) > _MOST_AXES:
            return None
        dims = tuple(dim if isinstance(dim, int) else None for dim in shape)
        return View.of(value, dims) if dims.count(None) < 2 and all(dim is None or 0 < dim < FAR for dim in dims) else None

    def _as_read(self, value: ir.Value | None) -> View | None:
        """A value for what reads it."""
        view = None if value is None else self._known.get(value)
        if value is None or view is None or view.source is value or self.through or len(value.uses()) < 2 or view.is_straight:
            return view
        dims = tuple(view.shape)
        self._turned_of[value] = view.source
        return View.of(value, dims) if dims.count(None) < 2 else None

    def is_worth_it(self, node: ir.Node, view: View) -> bool:
        """Whether the operators that make a node's output are better one copy."""
        (value,) = node.outputs
        least = _FEW_ELEMENTS if view.moves > 1 else _MANY_ELEMENTS
        if not view.moves or view.source is value or not view.groups or math.prod(size or 1 for size in view.shape) < least:
            return False
        uses = value.uses()
        if not uses and not value.is_graph_output():
            return False
        readers = [use.node for use in uses]
        if not value.is_graph_output() and all(
            len(reader.outputs) == 1 and (after := self.of(reader.outputs[0])) is not None and after.source is view.source
            for reader in readers
        ):
            return False  # it goes into copies of what this one is made of
        if node.op_type == "Transpose" and any(reader.op_type in _PRODUCTS for reader in readers):
            return False
        axes = view.axes()
        return len(axes) <= _MOST_AXES and all(
            abs(number) < FAR for number in (*view.starts, *(n for a in axes for n in (a.size or 0, *a.steps)))
        )

    def products_of(self, node: ir.Node) -> tuple[ir.Value, View, int, int] | None:
        """The rows, the columns (channels, positions, windows), the results and the number of products of a gradient for weights that a
        Concat interleaves; None for any other.
        """
        interleaved = _interleaved(node)
        if interleaved is None:
            return None
        gemms, count = interleaved
        rows, positions = gemms[0].inputs[0], len(node.inputs)
        views = [view for gemm in gemms if (view := self.of(gemm.inputs[1])) is not None and view.moves and len(view.groups) == 2]
        if rows is None or len(views) < len(gemms) or any(gemm.inputs[0] is not rows for gemm in gemms):
            return None
        each, (windows, width) = positions // len(gemms), views[0].shape
        if width is None or width % each or count % (width // each):
            return None
        channels = width // each
        # (windows, positions of a product, channels), for each product
        shaped = [found for view in views if (found := view.reshaped([-1 if windows is None else windows, each, channels])) is not None]
        if len(shaped) < len(views):
            return None
        joined = View.joined(shaped, 1) if len(shaped) > 1 else shaped[0]
        turned = None if joined is None else joined.transposed([2, 1, 0])
        return None if turned is None else (rows, turned, count // channels, len(gemms))


def _interleaved(node: ir.Node) -> tuple[list[ir.Node], int] | None:
    """The plain products whose columns, in equal parts, a Concat puts side by side as columns, and how long these are."""
    if attr(node, "axis") != 1 or len(node.inputs) < 2 or len(node.outputs) != 1:
        return None
    gemms: list[ir.Node] = []
    lengths = set()
    for place, value in enumerate(node.inputs):
        reshape = made_by(value, "Reshape")
        sizes = None if reshape is None else _row(reshape, 1)
        part = None if reshape is None else reshape.inputs[0]
        split = made_by(part, "Split")
        each = 1 if split is None else len(split.outputs)
        if split is not None:
            if len(split.inputs) > 1 or attr(split, "axis") != 1 or part is not split.outputs[place % each]:
                return None
            part = split.inputs[0]
        gemm = made_by(part, "Gemm")
        if gemm is None or not _is_plain(gemm) or sizes is None or len(sizes) != 2 or sizes[0] <= 0 or sizes[1] != 1:
            return None
        lengths.add(sizes[0])
        if place % each == 0:
            gemms.append(gemm)
        if gemms[-1] is not gemm or len(gemms) != place // each + 1:
            return None
    return (gemms, lengths.pop()) if len(lengths) == 1 and len(node.inputs) % len(gemms) == 0 else None


def _is_plain(gemm: ir.Node) -> bool:
    """Whether a Gemm is the product of its two inputs as they are."""
    scaled = attr(gemm, "alpha") != 1.0 or attr(gemm, "transA") or attr(gemm, "transB")
    return len(gemm.inputs) == 2 and not scaled


def _tensors(node: ir.Node) -> Sequence[ir.Value | None]:
    """What a node moves."""
    return node.inputs if node.op_type == "Concat" else node.inputs[:1]


def _may_move(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in _MOVES and len(node.outputs) == 1 and len(node.inputs) > 0


def _move(node: ir.Node, views: list[View]) -> View | None:
    """What a node makes of views; None where that is none."""
    return _MOVES[node.op_type](node, views)


def _constant(node: ir.Node, place: int) -> np.ndarray | None:
    """An input that no caller can give another value; None where there is none."""
    return fixed_array(node.inputs[place]) if place < len(node.inputs) else None


def _row(node: ir.Node, place: int) -> list[int] | None:
    """An input of constant ints."""
    found = _constant(node, place)
    return found.ravel().tolist() if found is not None and found.dtype.kind == "i" and found.size <= _MOST_AXES * 2 else None


def _has(node: ir.Node, place: int) -> bool:
    return place < len(node.inputs) and node.inputs[place] is not None


def _axis(node: ir.Node, rank: int) -> int | None:
    """The axis that a node says, counted from the front."""
    axis = attr(node, "axis")
    return axis % rank if isinstance(axis, int) and -rank <= axis < rank else None


def _concat(node: ir.Node, views: list[View]) -> View | None:
    axis = _axis(node, len(views[0].groups))
    return View.joined(views, axis) if len(views) > 1 and axis is not None else None


def _gather(node: ir.Node, views: list[View]) -> View | None:
    axis, indices = _axis(node, len(views[0].groups)), _constant(node, 1)
    if axis is None or indices is None or indices.dtype.kind != "i" or indices.size > _MOST_PLACES:
        return None
    return views[0].picked(axis, indices.astype(np.int64))


def _pad(node: ir.Node, views: list[View]) -> View | None:
    (view,) = views
    pads = _row(node, 1)
    filling = _constant(node, 2) if _has(node, 2) else np.zeros(1)
    if pads is None or _has(node, 3) or attr(node, "mode", "constant") not in ("constant", b"constant") or filling is None:
        return None
    if (
        filling.size != 1
        or filling.dtype.kind != "f"
        or filling.ravel()[0] != 0
        or np.signbit(filling.ravel()[0])
        or len(pads) != 2 * len(view.groups)
    ):
        return None
    return view.padded(pads[: len(view.groups)], pads[len(view.groups) :])


def _reshape(node: ir.Node, views: list[View]) -> View | None:
    shape = _row(node, 1)
    return None if shape is None or attr(node, "allowzero") or min(shape, default=0) < -1 else views[0].reshaped(shape)


def _slice(node: ir.Node, views: list[View]) -> View | None:
    view: View | None = views[0]
    starts, ends = _row(node, 1), _row(node, 2)
    if view is None or starts is None or ends is None or len(starts) != len(ends):
        return None
    rank = len(view.groups)
    axes = _row(node, 3) if _has(node, 3) else list(range(len(starts)))
    steps = _row(node, 4) if _has(node, 4) else [1] * len(starts)
    if (
        axes is None
        or steps is None
        or not len(axes) == len(steps) == len(starts)
        or 0 in steps
        or not all(-rank <= a < rank for a in axes)
    ):
        return None
    if len({axis % rank for axis in axes}) < len(axes):
        return None
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = view.shape[axis]
        if size is None or size > _MOST_PLACES:
            return None
        places = range(size)[start:end:step]
        if places != range(size):
            view = view.picked(axis % rank, np.array(places, np.int64))
        if view is None:
            return None
    return view


def _transpose(node: ir.Node, views: list[View]) -> View | None:
    perm = attr(node, "perm", None)
    if perm is None:
        return views[0].transposed(range(len(views[0].groups))[::-1])
    return views[0].transposed(perm) if isinstance(perm, (list, tuple)) and all(isinstance(axis, int) for axis in perm) else None


_MOVES = {"Concat": _concat, "Gather": _gather, "Pad": _pad, "Reshape": _reshape, "Slice": _slice, "Transpose": _transpose}
_REMOVED_UNREAD = frozenset({*_MOVES, "Gemm", "Split"})
