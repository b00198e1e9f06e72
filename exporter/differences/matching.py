"""Which node of one graph is which of another, whatever their names and their order.

A node is known by what it computes from (a digest of itself and of everything before it) and by what becomes of it (the same for
everything behind it). Nodes with both digests equal are one; then those with one of them; then neighbours, through the same place, of
nodes that are known; then those that stand in the same order among the rest. No name is looked at.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from symbolics.graph.values import operator_text
from symbolics.graph.walk import subgraphs
from symbolics.node.names import CALL_ATTRIBUTE

__all__ = ["Matches", "attribute_digest", "bodies", "match_graphs"]

_MOST = 4000  # nodes of a graph that are compared by their order: it takes the square of that


@dataclass
class Matches:
    """What of one graph is what of another.

    Attributes:
        nodes: A node of the first -> the node of the second; bodies of control flow are `Matches` of their own.
        values: A value of the first -> the value of the second: outputs of these nodes, and what was known before.
        removed, added: Nodes that the first alone and the second alone has.
    """

    nodes: dict[ir.Node, ir.Node] = field(default_factory=dict)
    values: dict[ir.Value, ir.Value] = field(default_factory=dict)
    removed: list[ir.Node] = field(default_factory=list)
    added: list[ir.Node] = field(default_factory=list)

    @functools.cached_property
    def unmatched(self) -> frozenset[ir.Node]:
        """Nodes that one of the two alone has; asked when both are known."""
        return frozenset((*self.removed, *self.added))

    def add(self, a: ir.Node, b: ir.Node) -> None:
        """Two nodes are one."""
        self.nodes[a] = b
        self.values.update(zip(a.outputs, b.outputs, strict=False))


def match_graphs(a: ir.Graph | ir.Function, b: ir.Graph | ir.Function, known: Mapping[ir.Value, ir.Value]) -> Matches:
    """Match two graphs, without the bodies inside them.

    Args:
        a, b: The graphs.
        known: Values of the first, and what they are in the second: inputs, initializers, values of enclosing graphs.
    """
    number = {value: i for i, value in enumerate(known)}
    number_b = {other: number[value] for value, other in known.items()}
    sides = _Side(a, number), _Side(b, number_b)
    found = Matches(values=dict(known))
    left = dict.fromkeys(sides[1].nodes)
    for key in (lambda side, node: (side.before[node], side.behind[node]), lambda side, node: side.before[node]):
        _by_key(sides, key, found, left)
    _neighbours(sides, found, left)
    _by_key(sides, lambda side, node: side.behind[node], found, left)
    _neighbours(sides, found, left)
    for key in (lambda side, node: side.own[node], lambda _, node: operator_text(node)):
        _by_order(sides, key, found, left)
    found.removed = [node for node in sides[0].nodes if node not in found.nodes]
    found.added = list(left)
    return found


def attribute_digest(attribute: ir.Attr) -> str:
    """Equal for two attributes that say the same; of a PythonOp's call, the number of the call says nothing."""
    if attribute.is_ref():
        return _digest("reference", attribute.ref_attr_name)
    kind, value = attribute.type, attribute.value
    if kind is ir.AttributeType.GRAPH:
        return _body_digest(value)
    if kind is ir.AttributeType.GRAPHS:
        return _digest(*map(_body_digest, value))
    if kind is ir.AttributeType.TENSOR:
        return _tensor_digest(value)
    if kind is ir.AttributeType.TENSORS:
        return _digest(*map(_tensor_digest, value))
    if attribute.name == CALL_ATTRIBUTE and isinstance(value, str):
        value = _without_number(value)
    return _digest(kind, repr(tuple(value) if isinstance(value, (list, tuple)) else value))


def _without_number(call: str) -> str:
    try:
        entries = json.loads(call)
        return json.dumps({key: entries[key] for key in entries if key != "id"}) if isinstance(entries, dict) else call
    except (ValueError, RecursionError):  # what is wrong with it, its row says
        return call


def _tensor_digest(tensor: ir.TensorProtocol) -> str:
    data = repr(list(tensor.numpy().reshape(-1))).encode() if tensor.dtype is ir.DataType.STRING else tensor.tobytes()
    return _digest(tensor.dtype, tuple(tensor.shape.numpy()), hashlib.sha256(data).hexdigest())


def _body_digest(graph: ir.Graph) -> str:
    side = _Side(graph, {})
    return _digest(*sorted(side.before.values()), *(side.value(value) for value in graph.outputs))


def _digest(*parts: Any) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "backslashreplace")).hexdigest()[:32]


class _Side:
    """The digests of one graph: of its nodes alone, of what is before each, and of what is behind it.

    Args:
        graph: The graph.
        number: What values that are known from outside are called.
    """

    def __init__(self, graph: ir.Graph | ir.Function, number: Mapping[ir.Value, int]) -> None:
        self.nodes = list(graph)
        self._values: dict[ir.Value, str] = {value: _digest("known", i) for value, i in number.items()}
        for i, value in enumerate(graph.inputs):
            self._values.setdefault(value, _digest("input", i))
        if isinstance(graph, ir.Graph):
            for value in graph.initializers.values():
                if value not in self._values:
                    self._values[value] = _digest("initializer", "" if value.const_value is None else _tensor_digest(value.const_value))
        self.own = {node: self._own(node) for node in self.nodes}
        self.before: dict[ir.Node, str] = {}
        for node in self.nodes:
            digest = _digest(self.own[node], *(self.value(v) if v is not None else "" for v in node.inputs))
            self.before[node] = digest
            self._values.update((output, _digest(digest, i)) for i, output in enumerate(node.outputs))
        places: dict[ir.Value, list[int]] = {}
        for i, value in enumerate(graph.outputs):
            places.setdefault(value, []).append(i)
        self.behind: dict[ir.Node, str] = {}
        for node in reversed(self.nodes):
            readers = [sorted(f"{self.behind.get(use.node, 'inside')} {use.idx}" for use in output.uses()) for output in node.outputs]
            self.behind[node] = _digest(self.own[node], readers, [places.get(output, []) for output in node.outputs])

    def value(self, value: ir.Value) -> str:
        """Equal for two values that are computed alike; of what is not known here, one word."""
        return self._values.get(value, "elsewhere")

    def _own(self, node: ir.Node) -> str:
        attributes = sorted((name, attribute_digest(attribute)) for name, attribute in node.attributes.items())
        return _digest(operator_text(node), attributes, [v is None for v in node.inputs], [bool(v.name) for v in node.outputs])


_Sides = tuple[_Side, _Side]


def _by_key(sides: _Sides, key: Callable[[_Side, ir.Node], Hashable], found: Matches, left: dict[ir.Node, None]) -> None:
    """Match nodes of one key; of several, those that read what is known to be the same."""
    groups: dict[Hashable, dict[ir.Node, None]] = {}
    readers: dict[Hashable, dict[ir.Node, None]] = {}
    for node in left:
        k = key(sides[1], node)
        groups.setdefault(k, {})[node] = None
        readers.setdefault((k, tuple(map(id, node.inputs))), {})[node] = None
    for node in sides[0].nodes:
        if node in found.nodes:
            continue
        k = key(sides[0], node)
        wanted = tuple(id(None if value is None else found.values.get(value, value)) for value in node.inputs)
        for table, entry in ((readers, (k, wanted)), (groups, k)):
            other = next((other for other in table.get(entry, ()) if other in left), None)
            if other is not None:
                break
        else:
            continue
        found.add(node, other)
        del left[other], groups[k][other]
        readers[k, tuple(map(id, other.inputs))].pop(other, None)


def _neighbours(sides: _Sides, found: Matches, left: dict[ir.Node, None]) -> None:
    """Match what reads, and what makes, the same values through the same places, by the same operator."""
    inside = (set(sides[0].nodes), left)
    agenda = list(found.nodes.items())
    while agenda:
        a, b = agenda.pop()
        pairs: Iterable[tuple[ir.Node | None, ir.Node | None]] = itertools.chain(
            ((x.producer(), y.producer()) for x, y in zip(a.inputs, b.inputs, strict=False) if x is not None and y is not None),
            _readers(a, b),
        )
        for one, other in pairs:
            if one is None or other is None or one not in inside[0] or one in found.nodes or other not in inside[1]:
                continue
            if operator_text(one) == operator_text(other):
                found.add(one, other)
                del left[other]
                agenda.append((one, other))


def _readers(a: ir.Node, b: ir.Node) -> Iterator[tuple[ir.Node, ir.Node]]:
    """Of each output, the readers that are the only ones of their operator at their place."""
    for x, y in zip(a.outputs, b.outputs, strict=False):
        tables: list[dict[Any, list[ir.Node]]] = [{}, {}]
        for value, table in zip((x, y), tables, strict=True):
            for use in value.uses():
                table.setdefault((operator_text(use.node), use.idx), []).append(use.node)
        for key, nodes in tables[0].items():
            if len(nodes) == 1 == len(tables[1].get(key, ())):
                yield nodes[0], tables[1][key][0]


def _by_order(sides: _Sides, key: Callable[[_Side, ir.Node], Hashable], found: Matches, left: dict[ir.Node, None]) -> None:
    """Match the rest of the two lists of nodes where they go on alike."""
    rest = [node for node in sides[0].nodes if node not in found.nodes][:_MOST], list(left)[:_MOST]
    keys = [[key(side, node) for node in nodes] for side, nodes in zip(sides, rest, strict=True)]
    for start_a, start_b, size in difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks():
        for i in range(size):
            found.add(rest[0][start_a + i], rest[1][start_b + i])
            del left[rest[1][start_b + i]]


def bodies(a: ir.Node, b: ir.Node) -> Iterator[tuple[ir.Graph, ir.Graph]]:
    """The bodies of two nodes that are one, side by side."""
    yield from zip(subgraphs(a), subgraphs(b), strict=False)
