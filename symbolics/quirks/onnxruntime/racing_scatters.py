"""Additions to rows by several threads at once."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.graph.slow_operators import rewrite_slow_operators
from symbolics.graph.values import attr
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "scatter_in_turn"]

QUIRK = Quirk(
    upstream="onnxruntime",
    seen="1.32.0",
    wrong="ScatterND with a reduction gives its rows to several threads, and what two of them add to one place in the same moment is added once",
)


def scatter_in_turn(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Write ScatterND with a reduction in words with which no addition is lost; what an export or a gradient graph has is written so already."""
    found = [
        node for node in nodes if node.op_type == "ScatterND" and not node.domain and attr(node, "reduction") not in (None, "none", b"none")
    ]
    return rewrite_slow_operators(model, found) > 0 if found else False
