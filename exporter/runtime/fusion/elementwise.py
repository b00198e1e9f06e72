"""Elementwise operators that feed one another become one node, in memory: one pass over memory in place of one an operator.

An optimizer's update is some fourteen of them for each parameter, and what they cost is reading and writing: a third of a training step of
a small transformer. The native library computes such a chain block by block, and rounds after each operator as they do. The file on disk is
not touched, and other runtimes run what stands in it.

What goes into a chain: Add, Sub, Mul, Div, Sqrt and Neg of float32 or float64 whose output has the shape of the chain's last one; operands
have that shape too, or one element. Shapes are those that the file says; what differs at a run is an error of the node.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from symbolics.node.names import OWN_DOMAIN

__all__ = ["ELEMENTWISE", "fuse"]

ELEMENTWISE = "Elementwise"

#: operator -> its number in native_elementwise.h.
FUNCTIONS = {"Add": 0, "Sub": 1, "Mul": 2, "Div": 3, "Sqrt": 4, "Neg": 5}
#: As MOST_TEMPORARIES and MOST_PLACES there; a chain that needs more stays as it is.
TEMPORARIES, PLACES = 12, 512

#: Operators whose outputs have the shape of their operands, or none; the first operand's type or that of ``to``.
_FOLLOWED = {*FUNCTIONS, "Cast", "Pow", "Min", "Max", "Sum", "ReduceSum", "ReduceSumSquare"}
_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE}
_Shape = tuple[int, ...]
_Facts = tuple[_Shape | None, ir.DataType | None]


def fuse(model: ir.Model) -> int:
    """Put one node in the place of each chain that ends in an output of the graph, or of a branch, in place.

    Args:
        model: A model whose nodes stand in the order of their values.

    Returns:
        How many nodes were put in.
    """
    facts: dict[ir.Value, _Facts] = {}
    made = _fuse(model.graph, facts)
    for node in list(model.graph.all_nodes()):
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.GRAPH:
                made += _fuse(attribute.as_graph(), facts)
    if made:
        model.graph.opset_imports[OWN_DOMAIN] = 1
    return made


def _fuse(graph: ir.Graph, facts: dict[ir.Value, _Facts]) -> int:
    known = _Known(graph, facts)
    if not known.sorted:
        return 0
    taken: set[ir.Node] = set()
    made = 0
    for end in reversed(known.nodes):
        if end in taken or not known.fits(end) or not _is_end(end.outputs[0]):
            continue
        members = _grow(end, known, taken)
        program = _write(members, known) if len(members) > 1 else None
        if program is None:
            continue
        taken.update(members)
        _replace(graph, end, members, program)
        made += 1
    return made


class _Known:
    """What is known of a graph before it is changed.

    Attributes:
        nodes: Its nodes.
        place: The place of each.
        sorted: Whether each stands behind what it reads.
    """

    def __init__(self, graph: ir.Graph, facts: dict[ir.Value, _Facts]) -> None:
        self.nodes = list(graph)
        self.place = {node: number for number, node in enumerate(self.nodes)}
        self.sorted = all(
            self.place.get(producer, -1) < number  # -1: of a graph around this one
            for number, node in enumerate(self.nodes)
            for value in node.inputs
            if value is not None and (producer := value.producer()) is not None
        )
        self._facts = facts  # of the graphs around it, too
        for node in self.nodes:
            self._follow(node)

    def of(self, value: ir.Value | None) -> _Facts:
        """Shape and element type of a value; None for what is not known."""
        if value is None:
            return None, None
        if value not in self._facts:
            dims = None if value.shape is None else tuple(value.shape)
            shape = tuple(dim for dim in dims if isinstance(dim, int)) if dims is not None else None
            self._facts[value] = (shape if shape is not None and len(shape) == len(dims or ()) else None), value.dtype
        return self._facts[value]

    def _follow(self, node: ir.Node) -> None:
        """What an operator of scalars and equal shapes gives, where the file does not say."""
        if node.domain or len(node.outputs) != 1 or not node.inputs or node.op_type not in _FOLLOWED:
            return
        output = node.outputs[0]
        shape, dtype = self.of(output)
        given = [self.of(value) for value in node.inputs if value is not None]
        if dtype is None:
            dtype = ir.DataType(node.attributes["to"].as_int()) if "to" in node.attributes else given[0][1]
        if shape is None and node.op_type.startswith("Reduce"):
            keeps = node.attributes["keepdims"].as_int() if "keepdims" in node.attributes else 1
            shape = () if len(given) == 1 and not keeps and "axes" not in node.attributes else None
        elif shape is None:
            shapes = [s for s, _ in given if s is not None]
            shape = _broadcast(shapes) if len(shapes) == len(given) else None
        self._facts[output] = shape, dtype

    def fits(self, node: ir.Node, like: ir.Node | None = None) -> bool:
        """Whether a node may go into a chain, one that ends in another node."""
        if node.domain or node.op_type not in FUNCTIONS or len(node.inputs) != (1 if FUNCTIONS[node.op_type] > 3 else 2):
            return False
        shape, dtype = self.of(node.outputs[0])
        if shape is None or dtype not in _FLOATS or (like is not None and (shape, dtype) != self.of(like.outputs[0])):
            return False
        return all(s == shape or (s is not None and _is_single(s) and len(s) <= len(shape)) for s, _ in map(self.of, node.inputs))


def _is_end(value: ir.Value) -> bool:
    """Whether a value goes out of its graph, or does where a condition holds: a step whose gradients overflow keeps what it had."""
    return value.is_graph_output() or any(
        use.node.op_type == "Where" and not use.node.domain and use.node.outputs[0].is_graph_output() for use in value.uses()
    )


def _broadcast(shapes: Sequence[_Shape]) -> _Shape | None:
    """The shape of an operator's output, where all but single elements are alike."""
    full = max(shapes, key=lambda shape: (not _is_single(shape), len(shape)))
    return full if all(shape == full or (_is_single(shape) and len(shape) <= len(full)) for shape in shapes) else None


def _is_single(shape: _Shape) -> bool:
    return all(dim == 1 for dim in shape)


def _grow(end: ir.Node, known: _Known, taken: Collection[ir.Node]) -> list[ir.Node]:
    """The nodes of a chain in their order. Whoever else reads what they make stands behind its end, so that the chain can stand there."""
    members = {end}
    waiting: list[int] = []
    seen = {end}

    def look(node: ir.Node) -> None:
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if producer is not None and producer in known.place and producer not in seen:
                seen.add(producer)
                heapq.heappush(waiting, -known.place[producer])

    look(end)
    last = known.place[end]
    while waiting:  # from the end of the graph to its start: when it is a node's turn, its readers have had theirs
        node = known.nodes[-heapq.heappop(waiting)]
        if node in taken or not known.fits(node, end):
            continue
        if all(use.node in members or known.place.get(use.node, -1) > last for use in node.outputs[0].uses()):
            members.add(node)
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
    """The program of a chain; None where the native library has no room for it, or no operand has the shape of its result."""
    inside = {node.outputs[0] for node in members}
    inputs = list(dict.fromkeys(value for node in members for value in node.inputs if value is not None and value not in inside))
    outputs = [v for v in (node.outputs[0] for node in members) if v.is_graph_output() or any(use.node not in members for use in v.uses())]
    shape = known.of(members[-1].outputs[0])[0]
    full = next((place for place, value in enumerate(inputs) if known.of(value)[0] == shape), None)
    if full is None or len(inputs) + len(outputs) + TEMPORARIES > PLACES:
        return None
    program = _Program(inputs, outputs, full)
    places = {value: place for place, value in enumerate((*inputs, *outputs))}
    first = len(places)
    free = list(range(first, first + TEMPORARIES))
    last_read = {value: number for number, node in enumerate(members) for value in node.inputs if value is not None}
    for number, node in enumerate(members):
        operands = [value for value in node.inputs if value is not None]
        read = [places[value] for value in operands]
        for value in dict.fromkeys(operands):  # what is read for the last time makes room for the result: each element is read first
            if last_read[value] == number and places[value] >= first:
                heapq.heappush(free, places[value])
        result = node.outputs[0]
        if result not in places:
            if not free:
                return None
            places[result] = heapq.heappop(free)
        program.instructions += [FUNCTIONS[node.op_type], places[result], read[0], read[-1]]
    return program


def _replace(graph: ir.Graph, end: ir.Node, members: Iterable[ir.Node], program: _Program) -> None:
    """Put the node of a chain in the place of its end."""
    attributes = [ir.AttrInt64s("program", program.instructions), ir.AttrInt64("full", program.full)]
    node = ir.Node(OWN_DOMAIN, ELEMENTWISE, program.inputs, attributes, num_outputs=len(program.outputs), name=end.name)
    graph.insert_before(end, node)
    for old, new in zip(program.outputs, node.outputs, strict=True):
        new.name, new.type, new.shape = old.name, old.type or ir.TensorType(_type_of(program)), old.shape
        old.name = None
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    for member in reversed(list(members)):
        graph.remove(member, safe=True)


def _type_of(program: _Program) -> ir.DataType:
    kind = next((value.dtype for value in (*program.outputs, *program.inputs) if value.dtype is not None), None)
    assert kind is not None
    return kind
