"""What torch.onnx.export(dynamo=False) makes of open axes without a word: numbers, and as many parts as the example has."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnxscript.optimizer

from symbolics.capture.checks import chunks_of
from symbolics.capture.trace import Trace
from symbolics.graph.values import array_of, attr
from symbolics.graph.walk import discard, walk
from symbolics.users import warn

__all__ = ["say_of_open_axes"]


def say_of_open_axes(model: ir.Model, trace: Trace, examples: Mapping[tuple[str, int], int]) -> None:
    """Warn of what holds at the example's size alone, by line and axis. The sizes that the trace has kept for this leave the graph's outputs.

    Args:
        model: The translated model, with the shapes that onnx infers.
        trace: What was noticed in the trace.
        examples: (input, axis) -> the example's size, of the open axes.
    """
    graph = model.graph
    opened = {
        dim: size
        for (name, axis), size in examples.items()
        for value in graph.inputs
        if value.name == name
        for dim in _named(value, [axis])
    }
    kept = [graph.outputs.pop() for _ in trace.sizes.numbers][::-1]
    behind = [_sizes_behind(size) for size in kept]
    changing, unknown = _changing(model, [size for size, names in zip(kept, behind, strict=True) if not names <= opened.keys()], opened)
    said = set[str]()
    for size, names, number in zip(kept, behind, trace.sizes.numbers, strict=True):
        axes = names & opened.keys() or (_open_before(size) & opened.keys() if size in changing else set())
        if not axes and size in unknown:  # behind a Function, whose outputs have no sizes in the graph: by those of the example
            axes = {name for name, example in opened.items() if example in number.example}
        if axes and number.place not in said:
            said.add(number.place)
            where, axis = f"{number.how} {number.place}", min(axes)
            said_of = _of_steps if number.steps else _of_number
            said_of_parts = _of_chunks if number.is_chunks else _of_parts
            warn(said_of_parts(where, axis, number.parts) if number.parts else said_of(where, axis))
    heard = {
        shape.inputs[0] for size, number in zip(kept, trace.sizes.numbers, strict=True) if number.parts for shape in _shapes_behind(size)
    }
    for axis, parts in dict.fromkeys(_splits(graph, opened, heard)):
        warn(_of_parts("the model", axis, parts))
    _remove(graph, kept)
    trace.sizes.numbers = []


def _of_parts(where: str, axis: str, parts: int) -> str:
    return (
        f"{where} takes a tensor apart along the open axis {axis!r}: the file has {parts} parts, as the example, and fails at other sizes: "
        "write it with operations on the whole axis (reshape, unfold, cumsum), or give the axis a fixed size."
    )


def _of_chunks(where: str, axis: str, parts: int) -> str:
    return f"{where} {chunks_of(parts, f'the open axis {axis!r}')}"


def _of_number(where: str, axis: str) -> str:
    return (
        f"{where} makes a number of the size of the open axis {axis!r}: the file keeps the example's, in a loop as many steps: compute with the size itself, "
        "choose with torch.cond or torch.where, name the module of a loop in opaque=, or give the axis a fixed size."
    )


def _of_steps(where: str, axis: str) -> str:
    return (
        f"{where} goes along the open axis {axis!r} step by step, as ONNX has no node of it: the file keeps the example's number of steps, and cuts a longer axis off: "
        "name it in opaque=['torch.nn.modules.rnn:LSTM'], or give the axis a fixed size."
    )


def _splits(graph: ir.Graph, opened: Container[str], heard: Container[ir.Value | None]) -> Iterator[tuple[str, int]]:
    """(axis, parts) of the Splits along open axes that a scripted function or torch itself made, so that no call was heard of in the trace."""
    for node in walk(graph):
        if node.op_type != "Split" or node.domain or len(node.inputs) < 2 or (source := node.inputs[0]) is None or source in heard:
            continue
        if (sizes := array_of(node.inputs[1])) is not None:
            yield from ((name, len(sizes)) for name in _named(source, [attr(node, "axis", 0)]) if name in opened)


def _changing(model: ir.Model, sizes: Sequence[ir.Value], opened: Mapping[str, int]) -> tuple[set[ir.Value], set[ir.Value]]:
    """Those of the sizes that are another number where the open axes are twice as long as the example's, and those of which nobody knows."""
    if not sizes or not opened:
        return set(), set()
    try:
        once, twice = (_numbers(model, sizes, {name: size * times for name, size in opened.items()}) for times in (1, 2))
    except Exception:  # of onnx_ir or onnxscript: what cannot be folded is not known, and an export does not fail of a warning
        return set(), set()
    found = list(zip(sizes, once, twice, strict=True))
    unknown = {size for size, a, b in found if a is None or b is None}
    return {size for size, a, b in found if size not in unknown and not np.array_equal(a, b)}, unknown  # type: ignore[arg-type]


def _numbers(model: ir.Model, sizes: Sequence[ir.Value], opened: Mapping[str, int]) -> list[np.ndarray | None]:
    """What the sizes are where the open axes are so long; None where that takes more than shapes to know."""
    part = ir.convenience.extract(model.graph, list(model.graph.inputs), list(dict.fromkeys(sizes)))
    for value in part.inputs:
        value.shape = None if value.shape is None else ir.Shape([opened.get(str(dim), dim) for dim in value.shape])
    for node in part:
        for value in node.outputs:
            value.shape = None  # they are those of any size
    onnxscript.optimizer.fold_constants(ir.Model(part, ir_version=model.ir_version), onnx_shape_inference=True)
    found = dict(zip(dict.fromkeys(sizes), map(array_of, part.outputs), strict=True))
    return [found[size] for size in sizes]


def _open_before(size: ir.Value) -> set[str]:
    """The names of the axes of all inputs that a number is computed of."""
    given = {value for node in _before(size) for value in node.inputs if value is not None and value.is_graph_input()}
    return {name for value in given for name in _named(value)}


def _sizes_behind(size: ir.Value) -> set[str]:
    """The names of the symbolic sizes of which a number is computed; "" stands for those without one."""
    found = set[str]()
    for shape in _shapes_behind(size):
        places = [array_of(user.inputs[1]) if user.op_type == "Gather" else None for user, _ in shape.outputs[0].uses()]
        known = [int(axis) for place in places if place is not None for axis in place.reshape(-1)]
        if (source := shape.inputs[0]) is not None:
            found.update(_named(source, None if any(place is None for place in places) else known))
    return found


def _shapes_behind(size: ir.Value) -> Iterator[ir.Node]:
    """The Shapes of which a number is computed."""
    return (node for node in _before(size, lambda node: node.op_type != "Shape") if node.op_type == "Shape")


def _named(value: ir.Value, axes: Sequence[int] | None = None) -> Iterator[str]:
    """The names of the symbolic sizes of some axes, or all; "" where there is none."""
    if value.shape is None:
        yield ""
        return
    for axis in range(len(value.shape)) if axes is None else axes:
        if isinstance(dim := value.shape[axis], ir.SymbolicDim):
            yield dim.value or ""


def _before(value: ir.Value, follows: Callable[[ir.Node], bool] = lambda node: True) -> Iterator[ir.Node]:
    """The nodes that compute a value; what goes into one that is not to be followed is not among them."""
    waiting, seen = [value], set[ir.Node]()
    while waiting:
        node = waiting.pop().producer()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [given for given in node.inputs if given is not None and follows(node)]


def _remove(graph: ir.Graph, sizes: Sequence[ir.Value]) -> None:
    """Take out the nodes that computed the sizes and nothing else."""
    made = {node for size in sizes for node in _before(size) if not node.domain}
    for node in reversed(list(graph)):
        if node in made and not any(value.uses() or value.is_graph_output() for value in node.outputs):
            discard(node)
            graph.remove(node)
