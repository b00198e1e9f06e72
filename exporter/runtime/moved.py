"""What the operators of a graph that only move elements make, and the products that make gradients of convolutions for their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from exporter.runtime.facts import ShapeAndType, fact_of
from exporter.runtime.views import FAR, Axis, View
from symbolics.graph.values import attr, fixed_array, made_by

__all__ = ["FLOATS", "MOST_AXES", "MOVES", "Slide", "Views", "slide_of"]

#: Of a view that native operators copy.
MOST_AXES = 16  # as DIMS_MOST in native/elementwise.c
_MOST_BEFORE = 64  # before those that go on are one
_MOST_PLACES = 2**20  # of an index that is looked at
#: Element types of views.
FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})


class Views:
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
        if shape is None or kind not in FLOATS or value.const_value is not None or len(shape) > MOST_AXES:
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
    return node.domain == "" and node.op_type in MOVES and len(node.outputs) == 1 and len(node.inputs) > 0


def _move(node: ir.Node, views: list[View]) -> View | None:
    """What a node makes of views; None where that is none."""
    return MOVES[node.op_type](node, views)


def _constant(node: ir.Node, place: int) -> np.ndarray | None:
    """An input that no caller can give another value; None where there is none."""
    return fixed_array(node.inputs[place]) if place < len(node.inputs) else None


def _row(node: ir.Node, place: int) -> list[int] | None:
    """An input of constant ints."""
    found = _constant(node, place)
    return found.ravel().tolist() if found is not None and found.dtype.kind == "i" and found.size <= MOST_AXES * 2 else None


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


class Slide(NamedTuple):
    """A convolution of two axes and one group: what its windows read, and where.

    Attributes:
        large: The tensor (N, channels, H, W) that the windows slide over; ``small`` (N, results, OH, OW) has one element a window.
        images: The shape of ``large``; None for an open size. ``outs`` is that of ``small``.
        starts: Where the first window begins: negative in padding.
    """

    large: ir.Value
    small: ir.Value
    images: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    starts: list[int]


def slide_of(rows: View | None, columns: View) -> Slide | None:
    """The convolution whose gradient for weights is the product of two views; None where it is of no such.

    Args:
        rows: The gradients (results, windows) of a tensor (N, results, OH, OW).
        columns: What the windows see (channels, kernel positions, windows) of a tensor (N, channels, H, W).
    """
    if rows is None or len(rows.dims) != 4 or len(columns.dims) != 4 or any(rows.starts) or any(columns.starts[:2]):
        return None
    images, results, *outs = rows.dims
    image, result, down, across = View.of(rows.source, rows.dims).groups
    if rows.groups != (result, (*image, *down, *across)) or images != columns.dims[0] or results is None or columns.dims[1] is None:
        return None
    _, positions, windows = columns.groups
    kernel, dilations = _along_each(positions)
    sizes, strides = _along_each(axis for axis in windows if not axis.steps[0])
    channel = View.of(columns.source, columns.dims).groups[1]
    said = (channel, _grid(kernel, dilations), (*image, *_grid(sizes, strides)))
    if sizes != outs or columns.groups != said:
        return None
    return Slide(columns.source, rows.source, columns.dims, rows.dims, kernel, strides, dilations, list(columns.starts[2:]))


def _grid(sizes: Sequence[int], steps: Sequence[int]) -> tuple[Axis, ...]:
    """The indices of places of an image."""
    (down, across), (high, wide) = steps, sizes
    return tuple(axis for axis in (Axis(high, (0, 0, down, 0)), Axis(wide, (0, 0, 0, across))) if axis.size != 1)


def _along_each(axes: Iterable[Axis]) -> tuple[list[int], list[int]]:
    """How many places there are down and across an image, and by how much they move; 1 where no index moves along it."""
    sizes, steps = [1, 1], [1, 1]
    for axis in axes:
        for i in range(2):
            if axis.steps[2 + i]:
                sizes[i], steps[i] = axis.size or 0, axis.steps[2 + i]
    return sizes, steps


#: Operators that only move elements -> what one makes of views.
MOVES = {"Concat": _concat, "Gather": _gather, "Pad": _pad, "Reshape": _reshape, "Slice": _slice, "Transpose": _transpose}
