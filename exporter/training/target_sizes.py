"""Sizes of a loss's targets: open where they follow an open size of the model's inputs, and fixed elsewhere.

Torch leaves open what nothing says: the 3 of forces (atoms, 3) among it, so that a step would broadcast a reference of other sizes without
a word. Of sizes that differ under one name, whoever runs the step can tell the user.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import onnx_ir as ir

from symbolics.graph.shapes import BROADCAST, write_sizes
from symbolics.graph.values import attr
from symbolics.graph.walk import walk

__all__ = ["read_of_inputs", "settle_sizes"]

_NAME = re.compile(r"[^\W\d]\w*")


def settle_sizes(graph: ir.Graph, shapes: Sequence[Sequence[int]], count: int, asked: Collection[str], *, named: bool) -> None:
    """Write sizes of targets that are open for nothing as numbers, in place.

    Args:
        graph: An export of model and loss.
        shapes: The example's, of each input of the graph.
        count: How many of the inputs, in front, are the model's own arguments.
        asked: Targets of whose sizes the user has said himself what is open.
        named: Whether an open size has the model's name for it where torch has found that the two are one. Else the example has to tell.
    """
    if len(graph.inputs) != len(shapes):
        return
    inputs = list(zip(graph.inputs, shapes, strict=True))
    opened = {name: size for value, shape in inputs[:count] for _, name, size in _open(value, shape)}
    own = {word for name in opened for word in _NAME.findall(name)}
    own.update(name for value, shape in inputs[count:] if value.name in asked for _, name, _ in _open(value, shape))
    found: dict[str, int | str] = {**_met(graph, {value: shape for value, shape in inputs[count:] if value.name not in asked})}
    for value, shape in inputs[count:]:
        taken = {name for _, name, _ in _open(value, shape)}
        for _, name, size in _open(value, shape):
            if name in found or own.issuperset(_NAME.findall(name)):
                continue
            same = [other for other, its in opened.items() if its == size and other.isidentifier()]
            if not named and len(same) == 1 and same[0] not in taken:
                found[name] = same[0]
                taken.add(same[0])
            elif not _may_follow(size, opened.values()):
                found[name] = size
    write_sizes(graph, found)


def read_of_inputs(graph: ir.Graph, count: int) -> None:
    """Read sizes that targets share with the model's inputs of those inputs, in place: torch may take any, and the model runs without targets, too.

    Args:
        graph: An export of model and loss.
        count: How many of the inputs, in front, are the model's own arguments.
    """
    places = {
        str(dim): (value, axis)
        for value in reversed(graph.inputs[:count])
        for axis, dim in enumerate(value.shape or ())
        if isinstance(dim, ir.SymbolicDim)
    }
    targets = set(graph.inputs[count:])
    for node in walk(graph):
        target = node.inputs[0] if node.op_type == "Shape" and not node.domain else None
        if target is None or target not in targets or target.shape is None or (axis := _only_axis(node, len(target.shape))) is None:
            continue
        if (place := places.get(str(target.shape[axis]))) is not None:
            node.replace_input_with(0, place[0])
            node.attributes["start"] = ir.AttrInt64("start", place[1])
            node.attributes["end"] = ir.AttrInt64("end", place[1] + 1)


def _only_axis(node: ir.Node, rank: int) -> int | None:
    """The axis of which a Shape tells the size, None where it tells of others, too."""
    start, end, _ = slice(attr(node, "start", 0), attr(node, "end", None)).indices(rank)
    return start if end == start + 1 else None


def _met(graph: ir.Graph, targets: Mapping[ir.Value | None, Sequence[int]]) -> dict[str, int]:
    """The sizes of targets that meet a fixed size of another value element by element, as in a difference from what the model returns."""
    found = dict[str, int]()
    for node in graph:
        if node.op_type not in BROADCAST or node.domain:
            continue
        for target, other in itertools.permutations(node.inputs, 2):
            if target not in targets or target is None or other is None or other.shape is None:
                continue
            dims = list(zip(reversed(target.shape or ()), reversed(targets[target]), reversed(other.shape)))
            found |= {str(dim): size for dim, size, met in dims if isinstance(dim, ir.SymbolicDim) and dim.value and met == size > 1}
    return found


def _open(value: ir.Value, shape: Sequence[int]) -> Iterator[tuple[int, str, int]]:
    """(axis, name, the example's size) of the open axes of an input that have a name."""
    for axis, (dim, size) in enumerate(zip(value.shape or (), shape)):
        if isinstance(dim, ir.SymbolicDim) and dim.value:
            yield axis, str(dim.value), size


def _may_follow(size: int, opened: Collection[int]) -> bool:
    """Whether a size may be that of an open one, or computed of it: one more or less (the next token), half of it, a multiple (a flat batch)."""
    return any(size in (one, one - 1, one + 1, one // 2) or (one > 1 and size and not size % one) for one in opened)
