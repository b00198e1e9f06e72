"""Two random draws from equal inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx_ir as ir

from symbolics.graph.walk import walk
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "kept_apart"]

QUIRK = Quirk(
    upstream="onnx_ir",
    seen="1.1.0",
    wrong="CommonSubexpressionEliminationPass makes one of two Dropouts, or two Bernoullis, of one value",
)

_MERGED = ("Dropout", "Bernoulli")
_NUMBER = "pythonop_number"


@contextlib.contextmanager
def kept_apart(graph: ir.Graph) -> Iterator[None]:
    """While the block runs, an attribute tells them apart."""
    draws = [node for node in walk(graph) if node.op_type in _MERGED]
    for number, node in enumerate(draws):
        node.attributes[_NUMBER] = ir.AttrInt64(_NUMBER, number)
    try:
        yield
    finally:
        # A pass that inlines or rewrites may have copied the nodes.
        for node in walk(graph) if draws else ():
            node.attributes.pop(_NUMBER, None)
