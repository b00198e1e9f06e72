"""Where calls of modules begin and end in a graph in memory: identities around what such a call takes and gives.

While a graph is captured, optimized and differentiated, they keep calls apart; `symbolics.graph.outline` then makes functions of what lies
between them. No file has one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from symbolics.errors import FormatError
from symbolics.node.names import BOUNDARY_OP, INNER_DOMAIN

__all__ = ["BEHIND", "Edge", "Origin", "boundary", "edge_of", "is_boundary", "read_edge", "say_types"]


#: What the number of the gradient of a call is larger by.
BEHIND = 1 << 30


@dataclass(frozen=True)
class Origin:
    """Which module a call is of.

    Attributes:
        domain, name: What its function is to be called, where nothing else is.
        of: ``module:qualname`` of its class.
        path: Its path in the model, "" for the model itself.
    """

    domain: str
    name: str
    of: str
    path: str


@dataclass(frozen=True)
class Edge:
    """What one boundary says.

    Attributes:
        origin: The module.
        call: The number of the call; one inside of another has the larger number.
        out: Whether the call gives the value, or takes it.
        index: Which of the values that it takes, or gives.
        place: What that is called there.
        type, shape: Its element type and sizes, None for one that is not known; 0 and None where a capture says them itself.
    """

    origin: Origin
    call: int
    out: bool
    index: int
    place: str
    type: int = 0
    shape: tuple[int | None, ...] | None = None

    @property
    def text(self) -> str:
        """What the attribute ``id`` of the node says."""
        return json.dumps({**vars(self), "origin": vars(self.origin)}, separators=(",", ":"))


def is_boundary(node: ir.Node) -> bool:
    """Whether a node is such an identity."""
    return node.op_type == BOUNDARY_OP and node.domain == INNER_DOMAIN


def edge_of(node: ir.Node) -> Edge:
    """What a boundary says."""
    said = node.attributes.get("id")
    return read_edge(said.value if said is not None and isinstance(said.value, str) else "")


def read_edge(text: str) -> Edge:
    """What such a text says.

    Raises:
        FormatError: It is none: a file has such a node.
    """
    try:
        said = json.loads(text)
        shape = said["shape"]
        return Edge(**{**said, "origin": Origin(**said["origin"]), "shape": None if shape is None else tuple(shape)})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError.damaged(f"a {INNER_DOMAIN}::{BOUNDARY_OP}", "files have no such node") from error


def say_types(nodes: Iterable[ir.Node]) -> None:
    """Give what boundaries make the types that these say, where nobody else does: onnx infers nothing of them."""
    for node in filter(is_boundary, nodes):
        edge, made = edge_of(node), node.outputs[0]
        if made.type is None and edge.type:
            made.type, made.shape = ir.TensorType(ir.DataType(edge.type)), None if edge.shape is None else ir.Shape(edge.shape)


def boundary(value: ir.Value, edge: Edge, name: str) -> ir.Node:
    """A new boundary behind a value, of its type; the node and what it makes have a name."""
    node = ir.Node(INNER_DOMAIN, BOUNDARY_OP, [value], [ir.AttrString("id", edge.text)], name=name)
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = name, value.type, value.shape
    return node
