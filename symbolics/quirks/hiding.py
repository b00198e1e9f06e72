"""How nodes are kept from passes that would change what they compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from symbolics.graph.walk import walk

__all__ = ["hidden"]


@contextlib.contextmanager
def hidden(graph: ir.Graph, nodes: Iterable[ir.Node], domain: str) -> Iterator[None]:
    """While the block runs, standard operators have a domain of which no pass knows anything."""
    found = list(nodes)
    for node in found:
        node.domain = domain
    try:
        yield
    finally:  # a pass may have copied them
        for node in walk(graph) if found else ():
            if node.domain == domain:
                node.domain = ""
