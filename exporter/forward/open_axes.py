"""What torch.onnx.export(dynamo=False) makes of open axes without a word: numbers, and as many parts as the example has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from symbolics.capture.trace import Trace
from symbolics.graph.values import array_of, attr
from symbolics.graph.walk import walk
from symbolics.users import warn

__all__ = ["say_of_open_axes"]


def say_of_open_axes(graph: ir.Graph, trace: Trace) -> None:
    """Warn of what holds at the example's size alone, by line and axis. The sizes that the trace has kept for this leave the graph's outputs.

    Args:
        graph: The translated graph, with the shapes that onnx infers.
        trace: What was noticed in the trace.
    """
    open_names = {dim.value for value in graph.inputs for dim in value.shape or () if isinstance(dim, ir.SymbolicDim) and dim.value}
    sizes = [graph.outputs.pop() for _ in trace.numbers][::-1]
    said = set[str]()
    for node in walk(graph):
        axis, parts = _parts(node)
        shape = node.inputs[0].shape if parts and node.inputs[0] is not None else None
        if shape is None or not isinstance(dim := shape[axis], ir.SymbolicDim) or dim.value not in open_names:
            continue
        places = trace.parts.get((axis % len(shape), tuple(parts)), {"the model": None})
        if said.isdisjoint(places):
            said.update(places)
            warn(
                f"{' or '.join(places)} takes a tensor apart along the open axis {dim.value!r}: the file has {len(parts)} parts, as the example, and fails at "
                "other sizes: write it with operations on the whole axis (reshape, unfold, cumsum), or give the axis a fixed size."
            )
    for value, (_, how, place) in zip(sizes, trace.numbers, strict=True):
        if (names := sorted(_sizes_behind(value) & open_names)) and not any(place in other for other in said):
            said.add(place)
            warn(
                f"{how} {place} makes a number of the size of the open axis {names[0]!r}: the file keeps the example's: compute with x.shape[0] itself, choose "
                "with torch.cond or torch.where, or give the axis a fixed size."
            )
    trace.numbers = []


def _parts(node: ir.Node) -> tuple[int, list[int]]:
    """The axis and the sizes of a Split into known ones; no sizes where it is none."""
    sizes = array_of(node.inputs[1]) if node.op_type == "Split" and not node.domain and len(node.inputs) > 1 else None
    return (attr(node, "axis", 0), []) if sizes is None else (attr(node, "axis", 0), sizes.tolist())


def _sizes_behind(size: ir.Value) -> set[str]:
    """The names of the open sizes of which a number is computed."""
    waiting, seen, found = [size], set(), set()
    while waiting:
        node = waiting.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (
            node.op_type == "Gather"
            and (source := node.inputs[0]) is not None
            and (shape := source.producer()) is not None
            and shape.op_type == "Shape"
        ):
            found |= set(_dims(shape, array_of(node.inputs[1])))
        elif node.op_type != "Shape":
            waiting += [value for value in node.inputs if value is not None]
    return found


def _dims(shape: ir.Node, places: Any) -> Iterator[str]:
    dims = shape.inputs[0].shape if shape.inputs[0] is not None else None
    if dims is None or places is None:
        return
    for place in places.reshape(-1).tolist():
        if isinstance(dim := dims[place], ir.SymbolicDim) and dim.value:
            yield dim.value
