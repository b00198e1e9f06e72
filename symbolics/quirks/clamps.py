"""clamp with bounds that are numbers, and what onnxscript's optimizer makes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from symbolics.graph.values import is_float
from symbolics.graph.walk import walk
from symbolics.node.names import MARK_DOMAIN
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "clamp", "clamp_max", "clamp_min", "clamps_apart"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib and optimizer",
    seen="0.7.2",
    wrong="clamp with one bound is a Min or Max, which shares a gradient with the bound; relu beside a clamp, and minimum beside maximum, are "
    "fused into one Clip, through which a gradient flows at bounds where relu's is 0 and minimum's is shared",
)


def clamp(x: ir.Value, min: float | None = None, max: float | None = None) -> Any:
    """aten::clamp: one Clip, whose bounds have the element type of x."""
    from symbolics.quirks.opset import number, op  # onnxscript: who only loads a file need not wait for it

    low, high = (None if bound is None else number(bound, x) for bound in (min, max))
    return op.Identity(x) if low is None and high is None else op.Clip(x, low, high)


def clamp_min(x: ir.Value, min: float) -> Any:
    """aten::clamp_min."""
    return clamp(x, min)


def clamp_max(x: ir.Value, max: float) -> Any:
    """aten::clamp_max."""
    return clamp(x, None, max)


_BESIDE = {"Relu": {"Clip"}, "Min": {"Min", "Max"}, "Max": {"Min", "Max"}}


@contextlib.contextmanager
def clamps_apart(graph: ir.Graph) -> Iterator[None]:
    """While the block runs, another domain hides those that must not be fused."""
    hidden = [node for node in walk(graph) if node.op_type in _BESIDE and not node.domain and _fusible(node)]
    for node in hidden:
        node.domain = MARK_DOMAIN
    try:
        yield
    finally:
        for node in walk(graph) if hidden else ():
            if node.domain == MARK_DOMAIN and node.op_type in _BESIDE:
                node.domain = ""


def _fusible(node: ir.Node) -> bool:
    """Whether a neighbour, before or behind, is such that the optimizer makes one node of both; integers have no gradient."""
    makers = [value.producer() for value in node.inputs if value is not None]
    beside = [*makers, *(use.node for use in node.outputs[0].uses())]
    return is_float(node.outputs[0]) and any(other is not None and other.op_type in _BESIDE[node.op_type] for other in beside)
