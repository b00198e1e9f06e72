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
from collections.abc import Mapping

import onnx_ir as ir

from exporter.cpu.operators import DOMAIN
from exporter.cpu.weights import conv_weight_grad
from exporter.runtime.facts import ShapeAndType
from exporter.runtime.moved import MOST_AXES, MOVES, Views
from exporter.runtime.views import FAR, Axis, View
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.walk import remove_operators

__all__ = ["REARRANGE", "move_at_once"]

REARRANGE = "Rearrange"

_FEW_ELEMENTS, _MANY_ELEMENTS = 2**12, 2**13  # of fewer, onnxruntime's operators cost no more: of several, and of one
_MOST_WASTE = 1.3  # times as many places: the zeros are multiplied, too
_PRODUCTS = frozenset({"MatMul", "Gemm"})  # they read a matrix either way


def move_at_once(model: ir.Model, facts: Mapping[ir.Value, ShapeAndType] | None = None) -> int:
    """Replace what is written above in a model for onnxruntime's CPU with the native library, where the shapes are known.

    Args:
        model: Changed. Its nodes stand in the order of their values.
        facts: Shapes and element types of values that do not say it themselves. They may be wrong: the native library compares the shape
            of what it reads.

    Returns:
        How many nodes were put in.
    """
    found = Views(model.graph, facts or {}, through=True)
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
    found = Views(model.graph, facts or {})
    now: dict[ir.Value, ir.Value] = {}  # what was replaced -> what stands for it
    for node in list(model.graph):
        view = found.of(node.outputs[0]) if len(node.outputs) == 1 else None
        if view is not None and _is_worth_it(found, node, view):
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


def _in_weight_order(op: Emitter, found: Views, rows: ir.Value, columns: View, results: int, parts: int) -> ir.Value:
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


def _is_worth_it(found: Views, node: ir.Node, view: View) -> bool:
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
        len(reader.outputs) == 1 and (after := found.of(reader.outputs[0])) is not None and after.source is view.source
        for reader in readers
    ):
        return False  # it goes into copies of what this one is made of
    if node.op_type == "Transpose" and any(reader.op_type in _PRODUCTS for reader in readers):
        return False
    axes = view.axes()
    return len(axes) <= MOST_AXES and all(
        abs(number) < FAR for number in (*view.starts, *(n for a in axes for n in (a.size or 0, *a.steps)))
    )


_REMOVED_UNREAD = frozenset({*MOVES, "Gemm", "Split"})
