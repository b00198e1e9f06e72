"""Where a graph rounds numbers to levels: each quantiser of activations, from the value that it takes to the one that it gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from exporter.quantization.evaluation import Constants, compiled, nodes_between
from exporter.quantization.grids import Grid, find_grid
from symbolics.errors import FormatError
from symbolics.graph.values import attr

__all__ = ["Missed", "Quantizer", "find_quantizers"]

#: What rounds: each quantiser has one of them.
_STEPS = {"Round", "Floor", "Ceil", "QuantizeLinear", "Cast"}
#: What computes each number by itself; a quantiser is made of these alone. Relu is a lower end where it comes before the rounding.
_ELEMENTWISE = _STEPS | set(
    "Abs Add And CastLike Clip ConstantOfShape DequantizeLinear Div Equal Expand Greater GreaterOrEqual Identity Less LessOrEqual Max Min Mul Neg Not Or "
    "Reciprocal Relu Shape Sign Sub Sum Where Xor".split()
)
_NO_REASON = "it is no rounding of one value: another value of the model, a scale that is computed, goes into it"
_MOST_TRIES, _MOST_BEFORE = 40, 24


@dataclass(eq=False)
class Quantizer:
    """A quantiser of activations.

    Attributes:
        source: What it rounds.
        result: What it gives.
        grid: Its levels.
        step: The node that rounds.
        doubt: Why something larger around it is no quantiser, "" where nothing is: it may be a part of one alone.
    """

    source: ir.Value
    result: ir.Value
    grid: Grid
    step: ir.Node
    doubt: str = ""


@dataclass(eq=False)
class Missed:
    """A node that rounds, and is in no quantiser that integer kernels know.

    Attributes:
        step: The node.
        reason: Why.
    """

    step: ir.Node
    reason: str


def find_quantizers(model: ir.Model, constants: Constants) -> tuple[list[Quantizer], list[Missed]]:
    """The quantisers of activations of a graph, and what rounds without being part of one."""
    found: list[Quantizer] = []
    missed: list[Missed] = []
    done: set[ir.Node] = set()
    for node in model.graph:
        if node in done or not _rounds(node) or node.outputs[0] in constants:
            continue
        made = _quantizer_at(model, constants, node)
        if isinstance(made, str):
            missed.append(Missed(node, made))
            continue
        found.append(made)
        done.update(nodes_between([made.source], [made.result]))
    return found, [each for each in missed if each.step not in done]


def _rounds(node: ir.Node) -> bool:
    if node.domain or node.op_type not in _STEPS:
        return False
    if node.op_type != "Cast":
        return True
    source = node.inputs[0]
    return source is not None and (source.dtype or ir.DataType.INT64).is_floating_point() and ir.DataType(attr(node, "to")).is_integer()


def _quantizer_at(model: ir.Model, constants: Constants, step: ir.Node) -> Quantizer | str:
    """The quantiser that a node rounds for: from the farthest value before it to the last one behind it between which it is proven; or why there is none."""
    reason, tries = _NO_REASON, 0
    sources = list(itertools.islice(_before(constants, step), _MOST_BEFORE))
    for result in reversed(_behind(constants, step, sources)):
        for source in reversed(sources):
            if (nodes := _made_of(constants, source, result)) is None:
                continue
            held = constants.arrays(_constants_of(constants, nodes))
            if any(array.size != 1 for array in held):
                reason = "it has steps of its own for each channel: integer kernels take one step for all activations"
                continue
            tries += 1
            try:
                grid = find_grid(_function(model, source, result), [array for array in held if array.dtype == np.float32])
            except FormatError as error:
                reason = str(error)
                continue
            if isinstance(grid, Grid):
                return Quantizer(source, result, grid, step, reason)
            reason = grid if reason == _NO_REASON else reason
            if tries >= _MOST_TRIES:
                return reason
    return reason


def _function(model: ir.Model, source: ir.Value, result: ir.Value) -> Callable[[np.ndarray], np.ndarray]:
    call = compiled(model, [source], [result], numbers=True)
    return lambda x: call(x)[0]


def _before(constants: Constants, step: ir.Node) -> Iterator[ir.Value]:
    """The values that a rounding may start from, nearest first."""
    todo = [value for value in step.inputs[:1] if value is not None]
    seen = set(todo)
    while todo:
        value = todo.pop(0)
        if value.dtype in (None, ir.DataType.FLOAT):
            yield value
        node = value.producer()
        if node is None or node.domain or node.op_type not in _ELEMENTWISE:
            continue
        for each in node.inputs:
            if each is not None and each not in constants and each not in seen:
                seen.add(each)
                todo.append(each)


def _behind(constants: Constants, step: ir.Node, sources: Container[ir.Value]) -> list[ir.Value]:
    """The float values that elementwise operators make of what a node rounds, of what it may start from, and of constants; nearest first."""
    made = set(step.outputs)
    found = [step.outputs[0]] if step.op_type in ("Round", "Floor", "Ceil") else []
    todo = [step.outputs[0]]
    while todo:
        for node in todo.pop(0).consumers():
            output = node.outputs[0]
            if node.domain or node.op_type not in _ELEMENTWISE or node.op_type == "Relu" or output in made:
                continue
            if all(value is None or value in made or value in constants or value in sources for value in node.inputs):
                made.add(output)
                todo.append(output)
                if output.dtype in (None, ir.DataType.FLOAT):
                    found.append(output)
    return found


def _made_of(constants: Constants, source: ir.Value, result: ir.Value) -> list[ir.Node] | None:
    """The nodes that make a value of another and of constants, each number by itself; None where something else goes into it."""
    found: set[ir.Node] = set()
    todo = [result]
    reached = False
    while todo:
        value = todo.pop()
        if value is source:
            reached = True
            continue
        node = value.producer()
        if value in constants or node in found:
            continue
        if node is None or node.domain or node.op_type not in _ELEMENTWISE:
            return None
        found.add(node)
        todo += [each for each in node.inputs if each is not None]
    return list(found) if reached else None


def _constants_of(constants: Constants, nodes: list[ir.Node]) -> list[ir.Value]:
    return [value for node in nodes for value in node.inputs if value is not None and value in constants]
