"""clamp with bounds that are numbers, and what onnxscript's optimizer makes of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import onnx_ir as ir

from symbolics.graph.values import is_float
from symbolics.graph.walk import walk
from symbolics.quirks.hiding import hidden
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "clamp", "clamp_max", "clamp_min", "clamp_tensor", "clamps_apart"]

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


def clamp_tensor(x: ir.Value, min: ir.Value | None = None, max: ir.Value | None = None) -> Any:
    """aten::clamp.Tensor, where the bounds are numbers: torch.onnx makes tensors of them to promote their types."""
    from onnxscript.function_libs.torch_lib.ops.core import aten_clamp_tensor as torchlibs

    from symbolics.quirks.opset import op

    given = [bound for bound in (min, max) if bound is not None]
    if not given or any(bound.shape is None or len(bound.shape) for bound in given):
        return torchlibs(x, min, max)
    return op.Clip(x, *(None if bound is None else op.CastLike(bound, x) for bound in (min, max)))


_BESIDE = {"Relu": {"Clip"}, "Min": {"Min", "Max"}, "Max": {"Min", "Max"}}


def clamps_apart(graph: ir.Graph) -> AbstractContextManager[None]:
    """While the block runs, another domain hides those that must not be fused."""
    return hidden(graph, (node for node in walk(graph) if node.op_type in _BESIDE and not node.domain and _fusible(node)), "pythonop.clamp")


def _fusible(node: ir.Node) -> bool:
    """Whether a neighbour, before or behind, is such that the optimizer makes one node of both; integers have no gradient."""
    makers = [value.producer() for value in node.inputs if value is not None]
    beside = [*makers, *(use.node for use in node.outputs[0].uses())]
    return is_float(node.outputs[0]) and any(other is not None and other.op_type in _BESIDE[node.op_type] for other in beside)
