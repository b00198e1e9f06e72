"""The nodes of one call of a module, and what they compute: calls that compute the same are calls of one function."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from symbolics.graph.boundaries import Edge
from symbolics.node.names import CALL_ATTRIBUTE, MODULE_PROPERTY, OPAQUE_PROPERTY, SOURCE_PROPERTY
from symbolics.node.numbers import number_in, with_number

__all__ = ["Key", "Region"]

_OF_A_PLACE = (MODULE_PROPERTY, SOURCE_PROPERTY, OPAQUE_PROPERTY)


@dataclass
class Region:
    """The nodes of one call, and what goes into them and out.

    Attributes:
        nodes: In an order that the values alone decide.
        taken: What the call takes, and reads from elsewhere, in the order of the function's inputs: each with what stands for it in the graph.
        kinds: Of each input: how it is known, and its name.
        constants: The constants that stand in the body.
        given: Its outputs, each with its name.
        exits: The boundaries behind each of them.
    """

    edge: Edge
    nodes: list[ir.Node]
    taken: dict[ir.Value, ir.Value] = field(default_factory=dict)
    kinds: list[tuple[str, str]] = field(default_factory=list)
    constants: dict[ir.Value, ir.TensorProtocol] = field(default_factory=dict)
    given: dict[ir.Value, str] = field(default_factory=dict)
    exits: dict[ir.Value, list[ir.Node]] = field(default_factory=dict)


class Key:
    """What a call computes, as a text of which equal ones are one function: names say nothing in it."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._numbers: dict[ir.Value, Any] = {value: ("x", i) for i, value in enumerate(region.taken)}
        self._numbers |= {value: ("c", *_of_tensor(tensor)) for value, tensor in region.constants.items()}

    def text(self) -> Any:
        """The key."""
        region = self._region
        types = [
            (kind, value.dtype, None if value.shape is None else len(value.shape)) for (kind, _), value in zip(region.kinds, region.taken)
        ]
        origin = region.edge.origin
        return repr(
            (origin.domain, origin.name, origin.of, types, self._nodes(region.nodes), [self._numbers[value] for value in region.given])
        )

    def _nodes(self, nodes: Iterable[ir.Node]) -> list[Any]:
        return [self._node(node) for node in nodes]

    def _node(self, node: ir.Node) -> Any:
        read = [None if value is None else self._numbers.get(value, "?") for value in node.inputs]
        attributes = [(name, self._attribute(name, a)) for name, a in sorted(node.attributes.items())]
        notes = sorted((key, text) for key, text in node.metadata_props.items() if key.startswith("pythonop.") and key not in _OF_A_PLACE)
        for value in node.outputs:
            self._numbers[value] = ("v", len(self._numbers))
        return (node.domain, node.op_type, node.overload, read, attributes, notes, [bool(value.name) for value in node.outputs])

    def _attribute(self, name: str, a: ir.Attr) -> Any:
        if a.is_ref():
            return ("ref", a.ref_attr_name)
        if a.type is ir.AttributeType.GRAPH:
            return self._graph(a.value)
        if a.type is ir.AttributeType.GRAPHS:
            return [self._graph(graph) for graph in a.value]
        if a.type is ir.AttributeType.TENSOR:
            return _of_tensor(a.value)
        if name == CALL_ATTRIBUTE and a.type is ir.AttributeType.STRING:
            return with_number(a.value, "") if number_in(a.value) is not None else a.value
        return (a.type, list(a.value) if isinstance(a.value, (list, tuple)) else a.value)

    def _graph(self, graph: ir.Graph) -> Any:
        for value in graph.inputs:
            self._numbers[value] = ("b", len(self._numbers))
        for value in graph.initializers.values():
            self._numbers[value] = ("c", *_of_tensor(value.const_value))
        types = [(value.dtype, None if value.shape is None else len(value.shape)) for value in graph.inputs]
        return (types, self._nodes(graph), [self._numbers.get(value, "?") for value in graph.outputs])


def _of_tensor(tensor: Any) -> tuple[Any, ...]:
    return (tensor.dtype, tuple(tensor.shape), tensor.tobytes())
