"""Additions to rows by several threads at once."""

from __future__ import annotations

from symbolics.graph.slow_operators import scatter_in_turn
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "scatter_in_turn"]

QUIRK = Quirk(
    upstream="onnxruntime",
    seen="1.32.0",
    wrong="ScatterND with a reduction gives its rows to several threads, and what two of them add to one place in the same moment is added once",
)
