"""What the operators of a graph that only move elements make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from exporter.cpu.views import FAR, View
from exporter.runtime.facts import ShapeAndType, fact_of
from symbolics.graph.values import attr, fixed_array

__all__ = ["FLOATS", "MOST_AXES", "MOVES", "Views"]

#: Of a view that native operators copy.
MOST_AXES = 16  # as DIMS_MOST in native/elementwise.c
_MOST_BEFORE = 64  # before those that go on are one
_MOST_PLACES = 2**20  # of an index that is looked at
#: Element types of views.
FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE})


class Views:
    """What the operators of a graph that only move elements make."""

    def __init__(self, graph: ir.Graph, facts: Mapping[ir.Value, ShapeAndType]) -> None:
        self.graph = graph
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
        """A value for what reads it: what several read and is read here and there is better turned once for all of them."""
        view = None if value is None else self._known.get(value)
        if value is None or view is None or view.source is value or len(value.uses()) < 2 or view.is_straight:
            return view
        dims = tuple(view.shape)
        self._turned_of[value] = view.source
        return View.of(value, dims) if dims.count(None) < 2 else None


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


#: Operators that only move elements -> what one makes of views.
MOVES = {"Concat": _concat, "Gather": _gather, "Pad": _pad, "Reshape": _reshape, "Slice": _slice, "Transpose": _transpose}
