"""Operators that only move elements become one copy, in memory.

A convolution's gradient lays out what its products read: Transpose, Pad, Gather, Slice, Concat. onnxruntime runs them one by one, most of
them in one thread, and what one core has written the other one then reads, which takes two to five times as long where the cores share no
cache. The native library writes the result of all of them at once, in as many threads as there are: a value that such operators make of another
one, and that anything else reads, is one node Rearrange.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import onnx_ir as ir

from exporter.cpu.moved import MOST_AXES, MOVES, Views
from exporter.cpu.operators import DOMAIN
from exporter.cpu.views import FAR, View
from exporter.runtime.facts import ShapeAndType
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.walk import remove_operators

__all__ = ["REARRANGE", "move_at_once", "rearranged"]

REARRANGE = "Rearrange"

_FEW_ELEMENTS, _MANY_ELEMENTS = 2**12, 2**13  # of fewer, onnxruntime's operators cost no more: of several, and of one
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
    scope = Scope(free_prefix(model.graph, "moved/"), lambda value: False)
    made = 0
    found = Views(model.graph, facts or {})
    now: dict[ir.Value, ir.Value] = {}  # what was replaced -> what stands for it
    for node in list(model.graph):
        view = found.of(node.outputs[0]) if len(node.outputs) == 1 else None
        if view is not None and _is_worth_it(found, node, view):
            op, value = Emitter(scope), node.outputs[0]
            moved = now[value] = rearranged(
                op, dataclasses.replace(view, source=now.get(view.source, view.source)), found.kind(view.source)
            )
            shape = moved.shape
            replace(scope, node, op.nodes, [moved])
            moved.shape = shape  # not what the file says of it, which onnxruntime would believe
            made += 1
    if made:
        scope.register(model.graph)
        model.graph.opset_imports[DOMAIN] = 1
        remove_operators(model.graph, _REMOVED_UNREAD)
    return made


def rearranged(op: Emitter, view: View, kind: ir.DataType) -> ir.Value:
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


_REMOVED_UNREAD = frozenset(MOVES)
