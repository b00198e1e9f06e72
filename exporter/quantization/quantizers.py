"""Where a graph rounds numbers to levels: each quantiser of activations, from the value that it takes to the one that it gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from exporter.quantization.evaluation import Constants, compiled, nodes_between
from exporter.quantization.grids import Grid, find_grid
from symbolics.errors import FormatError
from symbolics.graph.values import attr

__all__ = ["ELEMENTWISE", "Missed", "Quantizer", "find_bipolar", "find_quantizers", "function_of"]

#: What rounds: each quantiser has one of them.
_STEPS = {"Round", "Floor", "Ceil", "QuantizeLinear", "Cast"}
#: What computes each number by itself; a quantiser is made of these alone. Relu is a lower end where it comes before the rounding.
ELEMENTWISE = _STEPS | set(
    "Abs Add And CastLike Clip ConstantOfShape DequantizeLinear Div Equal Expand Greater GreaterOrEqual Identity Less LessOrEqual Max Min Mul Neg Not Or "
    "Reciprocal Relu Shape Sign Sub Sum Where Xor".split()
)
#: What tells one side of a number from the other.
_SIDES = {"Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Sign"}
_MOST_TRIES, _MOST_BEFORE = 40, 24
_COMPUTED = (
    "it is no rounding of one value by a fixed step: another value of the model, such as a step that is computed at each run, goes into it "
    "(disable the observers, if it has any, before the export)"
)


@dataclass(eq=False)
class Quantizer:
    """A quantiser of activations.

    Attributes:
        source: What it rounds.
        result: What it gives.
        grid: Its levels.
        step: The node that rounds.
        beyond: Why what is computed farther on is not its result, "" where nothing is.
    """

    source: ir.Value
    result: ir.Value
    grid: Grid
    step: ir.Node
    beyond: str = ""


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
        if isinstance(made, Quantizer) and made.beyond and made.grid.scale == 1.0:
            made = made.beyond  # numbers of levels: what follows makes of them what the model goes on with
        if isinstance(made, str):
            missed.append(Missed(node, made))
            continue
        found.append(made)
        done.update(nodes_between([made.source], [made.result]))
    return found, [each for each in missed if each.step not in done]


def function_of(model: ir.Model, constants: Constants, quantizer: Quantizer) -> Callable[[np.ndarray], np.ndarray]:
    """A quantiser as a function of float32 numbers."""
    nodes = _made_of(constants, quantizer.source, quantizer.result)
    held = None if nodes is None else _numbers(constants, nodes)
    assert held is not None, quantizer.result.name
    return _function(model, quantizer.source, quantizer.result, held)


def find_bipolar(model: ir.Model, constants: Constants) -> list[tuple[ir.Value, ir.Value, np.float32]]:
    """What gives two levels around 0.0: what it takes, what it gives, and the upper level; 0.0 itself has that, too."""
    found: list[tuple[ir.Value, ir.Value, np.float32]] = []
    done: set[ir.Node] = set()
    for node in model.graph:
        if node in done or node.domain or node.op_type not in _SIDES or node.outputs[0] in constants:
            continue
        source = next((value for value in node.inputs if value is not None and value not in constants), None)
        results = [] if source is None else [value for value in _behind(constants, node, (source,))[0] if value.producer() not in done]
        for result in reversed(results):
            scale = None if source is None else _bipolar_scale(model, constants, source, result)
            if scale is not None and source is not None:
                found.append((source, result, scale))
                done.update(nodes_between([source], [result]))
                break
    return found


def _bipolar_scale(model: ir.Model, constants: Constants, source: ir.Value, result: ir.Value) -> np.float32 | None:
    nodes = _made_of(constants, source, result)
    held = None if nodes is None else _numbers(constants, nodes)
    if held is None or source.dtype not in (None, ir.DataType.FLOAT) or not _of_one_shape(source, result):
        return None
    sizes = np.float32(2.0) ** np.arange(-140, 60, dtype=np.float32)
    x = np.concatenate([-sizes, np.zeros(1, np.float32), sizes])
    try:
        y = _function(model, source, result, held)(x)
    except FormatError:
        return None
    top = y[-1]
    fits = y.shape == x.shape and np.isfinite(top) and top > 0 and np.array_equal(y, np.where(x >= 0, top, -top))
    return np.float32(top) if fits else None


def _rounds(node: ir.Node) -> bool:
    if node.domain or node.op_type not in _STEPS:
        return False
    if node.op_type != "Cast":
        return True
    source, to = node.inputs[0], attr(node, "to")
    known = to in ir.DataType.__members__.values()  # a damaged file may say any number
    return source is not None and (source.dtype or ir.DataType.INT64).is_floating_point() and known and ir.DataType(to).is_integer()


def _quantizer_at(model: ir.Model, constants: Constants, step: ir.Node) -> Quantizer | str:
    """The quantiser that a node rounds for: from the farthest value before it to the last one behind it between which it is proven; or why there is none."""
    if (dtype := step.inputs[0].dtype if step.inputs[0] is not None else None) not in (None, ir.DataType.FLOAT):
        return f"it rounds {str(dtype).lower()}: integers are made of float32 models alone, model.float()"
    reason, tries = _COMPUTED, 0
    sources = list(itertools.islice(_before(constants, step), _MOST_BEFORE))
    results, computed = _behind(constants, step, sources)
    for result in reversed(results):
        for source in reversed(sources):
            if (nodes := _made_of(constants, source, result)) is None or not _of_one_shape(source, result):
                continue
            held = _numbers(constants, nodes)
            if held is None:
                reason = "it has steps of its own for each channel: integer kernels take one step for all activations"
                continue
            tries += 1
            try:
                grid = find_grid(_function(model, source, result, held), [array for array in held.values() if array.dtype == np.float32])
            except FormatError as error:
                reason = str(error)
                continue
            if isinstance(grid, Grid):
                beyond = reason if _computed_with(result) else ""
                return Quantizer(source, result, grid, step, beyond)
            reason = grid if tries == 1 else reason
            if tries >= _MOST_TRIES:
                return _COMPUTED if computed else reason
    return _COMPUTED if computed else reason


def _of_one_shape(source: ir.Value, result: ir.Value) -> bool:
    """Whether two values have one shape, as far as it is known: a step of a higher rank gives what it divides that rank."""
    if source.shape is None or result.shape is None:
        return True
    dims = list(zip(source.shape, result.shape, strict=False))
    return len(source.shape) == len(result.shape) and all(a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in dims)


def _computed_with(value: ir.Value) -> bool:
    """Whether arithmetic goes on with a value."""
    return any(use.node.op_type in ("Add", "Div", "Mul", "Sub") and not use.node.domain for use in value.uses())


def _function(
    model: ir.Model, source: ir.Value, result: ir.Value, held: Mapping[ir.Value, np.ndarray]
) -> Callable[[np.ndarray], np.ndarray]:
    call = compiled(model, [source], [result], numbers=held)
    return lambda x: call(x)[0]


def _numbers(constants: Constants, nodes: Iterable[ir.Node]) -> dict[ir.Value, np.ndarray] | None:
    """The constants that nodes read, each as the one number that it is made of; None where one has several."""
    found: dict[ir.Value, np.ndarray] = {}
    values = list(dict.fromkeys(value for node in nodes for value in node.inputs if value is not None and value in constants))
    for value, array in zip(values, constants.arrays(values), strict=True):
        if array.size == 0 or (array != array.flat[0]).any():
            return None
        found[value] = np.array(array.flat[0], array.dtype)
    return found


def _before(constants: Constants, step: ir.Node) -> Iterator[ir.Value]:
    """The values that a rounding may start from, nearest first."""
    todo = [value for value in step.inputs[:1] if value is not None]
    seen = set(todo)
    while todo:
        value = todo.pop(0)
        if value.dtype in (None, ir.DataType.FLOAT):
            yield value
        node = value.producer()
        if node is None or node.domain or node.op_type not in ELEMENTWISE:
            continue
        for each in node.inputs:
            if each is not None and each not in constants and each not in seen:
                seen.add(each)
                todo.append(each)


def _behind(constants: Constants, step: ir.Node, sources: Container[ir.Value]) -> tuple[list[ir.Value], bool]:
    """The float values that elementwise operators make of what a node rounds, of what it may start from, and of constants; nearest first.
    And whether arithmetic with another value of the model goes on with what is rounded.
    """
    made = set(step.outputs)
    found = [step.outputs[0]] if step.op_type in ("Round", "Floor", "Ceil") else []
    todo, others = [step.outputs[0]], []
    while todo:
        for node in todo.pop(0).consumers():
            output = node.outputs[0]
            if node.domain or node.op_type not in ELEMENTWISE or node.op_type == "Relu" or output in made:
                continue
            if all(value is None or value in made or value in constants or value in sources for value in node.inputs):
                made.add(output)
                todo.append(output)
                if output.dtype in (None, ir.DataType.FLOAT):
                    found.append(output)
            elif node.op_type in ("Add", "Div", "Mul", "Sub"):
                others.append(node)
    return found, any(node.outputs[0] not in made for node in others)


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
        if node is None or node.domain or node.op_type not in ELEMENTWISE:
            return None
        found.add(node)
        todo += [each for each in node.inputs if each is not None]
    return list(found) if reached else None
