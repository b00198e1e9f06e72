"""Elementwise operators that feed one another become one node, in memory: one pass over memory in place of one an operator.

An optimizer's update is some fourteen of them for each parameter, and what they cost is reading and writing: a third of a training step of
a small transformer. What lies around the products of a step is some more: the gradients of activations, normalizations and softmaxes. The
native library computes such a chain block by block, and rounds after each operator as they do. The file on disk is not touched, and other
runtimes run what stands in it.

What goes into a chain: operators of float32 or float64 in `_read` whose output has the shape of the chain's last one; operands have that shape
too, or broadcast to it along axes that are next to each other. Shapes are those that the file says or that ONNX infers of it; where they
differ at a run, the native library broadcasts operator by operator.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import onnx
import onnx_ir as ir

from exporter.cpu.operators import DOMAIN
from exporter.runtime.facts import Shape, ShapeAndType, inferred_graph, note_facts
from symbolics.graph.walk import subgraphs

__all__ = ["ELEMENTWISE", "fuse"]

ELEMENTWISE = "Elementwise"

#: function -> its number in native/elementwise.c. Greater, Guard and Gate are of two operators each: see `_read`.
FUNCTIONS = {"Add": 0, "Sub": 1, "Mul": 2, "Div": 3, "Sqrt": 4, "Neg": 5, "Greater": 6, "Guard": 7, "Gate": 8}
#: As MOST_TEMPORARIES and MOST_PLACES there; a chain that needs more stays as it is.
TEMPORARIES, PLACES = 12, 512

#: A chain of fewer operators and elements costs less as onnxruntime's own.
_FEW_OPERATORS, _FEW_ELEMENTS = 4, 4096
#: A longer chain saves nothing more, and looking for it takes a time that grows with the square.
_MOST_OPERATORS = 64
#: A result that more than these read stays as it is: who asks where they all stand waits, once for each of them.
_MOST_READERS = 64
#: As DIMS_MOST in native/elementwise.c.
_MOST_DIMS = 16
#: Before, an operand was aligned by attributes (axis, broadcast).
_FIRST_OPSET = 7
#: Operators between which a value may wait without being counted: it is read again before memory is short.
_NEAR = 32

_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE}
#: Function and places of its two operands; RESULT is what the step before it made.
_Step = tuple[int, int, int]
_RESULT = -1


def fuse(model: ir.Model, *, guards_only: bool = False, facts: dict[ir.Value, ShapeAndType] | None = None) -> int:
    """Put one node in the place of each chain, in place.

    Args:
        model: A model whose nodes stand in the order of their values.
        guards_only: Only what replaces NaN, alone: of a forward, onnxruntime has kernels for whole compositions (Gelu, normalizations),
            which it would no longer find.
        facts: Takes what is known of the model's values then; nothing where ONNX cannot tell.

    Returns:
        How many nodes were put in.
    """
    if model.graph.opset_imports.get("", 0) < _FIRST_OPSET:
        return 0
    inferred = inferred_graph(model)
    if inferred is None:
        return 0
    facts = {} if facts is None else facts
    made = _fuse_all(model.graph, inferred, facts, guards_only)
    if made:
        model.graph.opset_imports[DOMAIN] = 1
    return made


def _fuse_all(graph: ir.Graph, inferred: onnx.GraphProto, facts: dict[ir.Value, ShapeAndType], guards_only: bool) -> int:
    """Also in the bodies of its nodes."""
    note_facts(graph, inferred, facts)
    bodies: list[tuple[ir.Graph, onnx.GraphProto]] = []
    for node, twin in zip(graph, inferred.node, strict=True):
        inner, twins = subgraphs(node), [body for a in twin.attribute for body in ([a.g] if a.HasField("g") else a.graphs)]
        if len(inner) == len(twins):  # a file may call an attribute a graph, and give none
            bodies += zip(inner, twins, strict=True)
    return _fuse(graph, facts, guards_only) + sum(_fuse_all(body, twin, facts, guards_only) for body, twin in bodies)


def _fuse(graph: ir.Graph, facts: dict[ir.Value, ShapeAndType], guards_only: bool) -> int:
    known = _Known(graph, facts)
    if not known.sorted:
        return 0
    taken: set[ir.Node] = set()
    made = 0
    for end in reversed(known.nodes):
        if end in taken or (guards_only and end.op_type != "Where") or not known.fits(end):
            continue
        members = [end] if guards_only else _grow(end, known, taken)
        program = _write(members, known) if known.is_worth_it(members) else None
        if program is None and len(members) > TEMPORARIES:  # it may lack room: so many always have it
            members = _grow(end, known, taken, TEMPORARIES)
            program = _write(members, known) if known.is_worth_it(members) else None
        if program is None:
            continue
        taken.update(members)
        _replace(known, members, program)
        made += 1
    _finish(graph, known)
    return made


@dataclass
class _Reading:
    """An operator in functions of the native library.

    Attributes:
        operands: What it reads, of the shape and the type of its output or broadcast to them.
        steps: The functions, in their order.
        inner: A node between the operands and the operator, whose output is no number.
    """

    operands: list[ir.Value]
    steps: list[_Step]
    inner: ir.Node | None = None


def _number(value: ir.Value) -> float | None:
    """A constant of one element that no caller can give another value."""
    tensor = None if value.is_graph_input() else value.const_value
    return float(tensor.numpy().reshape(())) if tensor is not None and tensor.size == 1 and tensor.dtype in _FLOATS else None


class _Known:
    """What is known of a graph before it is changed.

    Attributes:
        nodes: Its nodes.
        place: The place of each.
        sorted: Whether each stands behind what it reads.
        crowded: Values that many read.
        replaced, removed: What `_finish` is to do.
        facts: Shapes and types of values, those of the graphs around it too.
    """

    def __init__(self, graph: ir.Graph, facts: dict[ir.Value, ShapeAndType]) -> None:
        self.nodes = list(graph)
        self.place = {node: number for number, node in enumerate(self.nodes)}
        self.sorted = all(
            self.place.get(producer, -1) < number  # -1: of a graph around this one
            for number, node in enumerate(self.nodes)
            for value in node.inputs
            if value is not None and (producer := value.producer()) is not None
        )
        self.facts = facts
        self.crowded = {output for node in self.nodes for output in node.outputs if len(output.uses()) > _MOST_READERS}
        self.replaced: dict[ir.Value, ir.Value] = {}
        self.removed: list[ir.Node] = []
        self._readings: dict[ir.Node, _Reading | None] = {}

    def of(self, value: ir.Value | None) -> ShapeAndType:
        """Shape and element type of a value; None for what is not known."""
        return (None, None) if value is None else self.facts.get(value, (None, None))

    def read(self, node: ir.Node) -> _Reading | None:
        """An operator in the library's functions; None where it has none for it.

        It is looked at once: what it reads is replaced by a chain only when all nodes from the chain's end on have had their turn.
        """
        if node not in self._readings:
            self._readings[node] = self._read(node)
        return self._readings[node]

    def _read(self, node: ir.Node) -> _Reading | None:
        if node.domain or len(node.outputs) != 1 or not node.inputs or any(value is None for value in node.inputs):
            return None
        operands = [value for value in node.inputs if value is not None]
        kind = node.op_type
        if kind in ("Add", "Sub", "Mul", "Div") and len(operands) == 2:
            return _Reading(operands, [(FUNCTIONS[kind], 0, 1)])
        if kind in ("Sqrt", "Neg") and len(operands) == 1:
            return _Reading(operands, [(FUNCTIONS[kind], 0, 0)])
        if kind == "Sum" and len(operands) > 1:
            add = FUNCTIONS["Add"]
            return _Reading(operands, [(add, 0, 1), *((add, _RESULT, place) for place in range(2, len(operands)))])
        if kind == "Pow" and len(operands) == 2 and self.of(operands[0])[1] == self.of(operands[1])[1]:
            steps = {2.0: [(FUNCTIONS["Mul"], 0, 0)], 3.0: [(FUNCTIONS["Mul"], 0, 0), (FUNCTIONS["Mul"], _RESULT, 0)]}
            power, shape = _number(operands[1]), self.of(node.outputs[0])[0]
            # onnxruntime multiplies along the last axis, and where that is one element it calls pow.
            width = shape[-1] if shape else 1
            is_wide = isinstance(width, int) and width > 1
            return _Reading(operands[:1], steps[power]) if power in steps and is_wide else None
        inner = operands[0].producer()
        given = [] if inner is None or inner.domain else [value for value in inner.inputs if value is not None]
        if kind == "Cast" and inner is not None and inner.op_type in ("Greater", "Less") and len(given) == 2:
            return _Reading(given if inner.op_type == "Greater" else given[::-1], [(FUNCTIONS["Greater"], 0, 1)], inner)
        if kind == "Where" and inner is not None and inner.op_type == "IsNaN" and len(operands) == 3 and given == [operands[2]]:
            number = _number(operands[1])  # in the place of NaN; of what else it is, onnxruntime's Where may lose the sign of a zero
            if number is not None and math.copysign(1.0, number) > 0 and self.of(operands[2])[0] == self.of(node.outputs[0])[0]:
                return _Reading([operands[2], operands[1]], [(FUNCTIONS["Guard"], 0, 1)], inner)
        if (
            kind == "Where"
            and inner is not None
            and inner.op_type in ("Greater", "Less")
            and len(given) == 2
            and _number(operands[2]) == 0.0
        ):
            pair = given if inner.op_type == "Greater" else given[::-1]
            return _Reading([*pair, operands[1]], [(FUNCTIONS["Greater"], 0, 1), (FUNCTIONS["Gate"], _RESULT, 2)], inner)
        return None

    def reading(self, node: ir.Node) -> _Reading:
        """The same of a node that fits."""
        found = self.read(node)
        assert found is not None
        return found

    def fits(self, node: ir.Node, like: ir.Node | None = None) -> bool:
        """Whether a node may go into a chain, one that ends in another node."""
        reading = self.read(node)
        if reading is None:
            return False
        shape, dtype = self.of(node.outputs[0])
        if (
            shape is None
            or len(shape) > _MOST_DIMS
            or dtype not in _FLOATS
            or (like is not None and (shape, dtype) != self.of(like.outputs[0]))
        ):
            return False
        given = [self.of(value) for value in reading.operands]
        return all(kind == dtype and dims is not None and _broadcasts(dims, shape) for dims, kind in given)

    def gone(self, members: Iterable[ir.Node]) -> set[ir.Node]:
        """The nodes that a chain takes the place of: its members, and what stands between them and their operands for them alone."""
        found = set(members)
        return found | {test for node in found if (test := self.test_of(node, found)) is not None}

    def test_of(self, node: ir.Node, members: Collection[ir.Node]) -> ir.Node | None:
        """What stands between a member and its operands for members alone."""
        test = self.reading(node).inner
        if test is None or test not in self.place or test.outputs[0] in self.crowded or test.outputs[0].is_graph_output():
            return None
        return test if all(use.node in members for use in test.outputs[0].uses()) else None

    def is_worth_it(self, members: Collection[ir.Node]) -> bool:
        """Whether one node in the place of several saves anything."""
        shape, _ = self.of(next(iter(members)).outputs[0])
        count = sum(1 if self.reading(node).inner is None else 2 for node in members)
        size = math.prod(dim if isinstance(dim, int) else _FEW_ELEMENTS for dim in shape or ())
        return count >= _FEW_OPERATORS or (count > 1 and size >= _FEW_ELEMENTS)

    def holds_more(self, node: ir.Node, end: ir.Node) -> bool:
        """Whether computing a node as late as at the end of a chain keeps more in memory than its own result."""
        last = self.place[end]
        if last - self.place[node] <= _NEAR:
            return False
        shape, _ = self.of(node.outputs[0])
        operands = {value for value in self.reading(node).operands if value.producer() in self.place}
        full = {value for value in operands if self.of(value)[0] == shape and value not in self.crowded}
        return sum(all(self.place.get(use.node, last) < last for use in value.uses()) for value in full) > 1


def _broadcasts(dims: Shape, shape: Shape) -> bool:
    """Whether a tensor broadcasts to a shape along axes that are next to each other: as `operand_of` in native/elementwise.c."""
    if len(dims) > len(shape):
        return False
    dims = (1,) * (len(shape) - len(dims)) + dims
    own = [axis for axis, dim in enumerate(dims) if dim != 1]
    return not own or dims[own[0] : own[-1] + 1] == shape[own[0] : own[-1] + 1]


def _grow(end: ir.Node, known: _Known, taken: Collection[ir.Node], most: int = _MOST_OPERATORS) -> list[ir.Node]:
    """The nodes of a chain in their order. Whoever else reads what they make stands behind its end, so that the chain can stand there."""
    members = {end}
    gone = known.gone(members)
    waiting: list[int] = []
    seen = {end}

    def look(node: ir.Node) -> None:
        for value in known.reading(node).operands:
            producer = value.producer()
            if producer is not None and producer in known.place and producer not in seen:
                seen.add(producer)
                heapq.heappush(waiting, -known.place[producer])

    look(end)
    last = known.place[end]
    while waiting and len(members) < most:  # from the end of the graph to its start: when it is a node's turn, its readers have had theirs
        node = known.nodes[-heapq.heappop(waiting)]
        if node in taken or node.outputs[0] in known.crowded or not known.fits(node, end) or known.holds_more(node, end):
            continue
        if all(use.node in gone or known.place.get(use.node, -1) > last for use in node.outputs[0].uses()):
            members.add(node)
            gone.add(node)
            test = known.test_of(node, members)
            if test is not None:
                gone.add(test)
            look(node)
    return sorted(members, key=known.place.__getitem__)


@dataclass
class _Program:
    """A chain for the native library.

    Attributes:
        inputs, outputs: Values of the graph.
        full: The place of an input that has the shape of the outputs.
        instructions: Four ints each: function, where the result goes, two operands. Places are inputs, then outputs, then temporaries.
    """

    inputs: list[ir.Value]
    outputs: list[ir.Value]
    full: int
    instructions: list[int] = field(default_factory=list)


def _write(members: Sequence[ir.Node], known: _Known) -> _Program | None:
    """The program of a chain; None where nobody reads it, the native library has no room for it, or no operand has the shape of its result."""
    readings = [known.reading(node) for node in members]
    inside, gone = {node.outputs[0] for node in members}, known.gone(members)
    inputs = list(dict.fromkeys(value for reading in readings for value in reading.operands if value not in inside))
    outputs = [v for v in (node.outputs[0] for node in members) if v.is_graph_output() or any(use.node not in gone for use in v.uses())]
    shape = known.of(members[-1].outputs[0])[0]
    full = next((place for place, value in enumerate(inputs) if known.of(value)[0] == shape), None)
    if full is None or not outputs or len(inputs) + len(outputs) + TEMPORARIES > PLACES:
        return None
    program = _Program(inputs, outputs, full)
    places = {value: place for place, value in enumerate((*inputs, *outputs))}
    first = len(places)
    free = list(range(first, first + TEMPORARIES))
    last_read = {value: number for number, reading in enumerate(readings) for value in reading.operands}
    for number, (node, reading) in enumerate(zip(members, readings, strict=True)):
        read = [places[value] for value in reading.operands]
        done = [places[v] for v in dict.fromkeys(reading.operands) if last_read[v] == number and places[v] >= first]
        if len(reading.steps) == 1:  # what is read for the last time makes room for the result: each element is read first
            free, done = [*free, *done], []
            heapq.heapify(free)
        result = node.outputs[0]
        if result not in places:
            if not free:
                return None
            places[result] = heapq.heappop(free)
        for function, *operands in reading.steps:
            program.instructions += [function, places[result], *(places[result] if k == _RESULT else read[k] for k in operands)]
        for place in done:
            heapq.heappush(free, place)
    return program if _is_full(program, {place for place, value in enumerate(inputs) if known.of(value)[0] == shape}) else None


def _is_full(program: _Program, full: set[int]) -> bool:
    """Whether each output is made of an operand of its shape: the library computes any other operator by operator."""
    for step in range(0, len(program.instructions), 4):
        _, to, *operands = program.instructions[step : step + 4]
        full = full | {to} if full.intersection(operands) else full - {to}
    return full.issuperset(range(len(program.inputs), len(program.inputs) + len(program.outputs)))


def _replace(known: _Known, members: Sequence[ir.Node], program: _Program) -> None:
    """Put the node of a chain in the place of its end."""
    end = members[-1]
    graph, (shape, dtype) = end.graph, known.of(end.outputs[0])
    assert isinstance(graph, ir.Graph) and dtype is not None
    attributes: list[ir.Attr] = [ir.AttrInt64s("program", program.instructions), ir.AttrInt64("full", program.full)]
    node = ir.Node(DOMAIN, ELEMENTWISE, program.inputs, attributes, num_outputs=len(program.outputs), name=end.name)
    graph.insert_before(end, node)
    known.place[node] = known.place[end]
    gone = known.gone(members)
    for old, new in zip(program.outputs, node.outputs, strict=True):
        new.name, new.type = old.name, old.type or ir.TensorType(dtype)
        new.shape = old.shape or ir.Shape(shape or ())  # onnxruntime cannot infer it, and wants it of the outputs of a body
        known.facts[new] = known.of(old)
        old.name = None
        for use in old.uses():
            use.node.replace_input_with(use.idx, new)
        known.replaced[old] = new
    for taken in sorted(gone, key=known.place.__getitem__, reverse=True):
        for place in range(len(taken.inputs)):
            taken.replace_input_with(place, None)
        known.removed.append(taken)


def _finish(graph: ir.Graph, known: _Known) -> None:
    """Take out what chains replaced, at once: each call looks through all outputs of the graph."""
    for place, output in enumerate(list(graph.outputs)):
        if output in known.replaced:
            graph.outputs[place] = known.replaced[output]
    graph.remove(known.removed)
