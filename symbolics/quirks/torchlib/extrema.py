"""amax and amin of all axes, for torch.onnx.export(dynamo=True)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "amax", "amin"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib",
    seen="0.7.2",
    wrong="amax and amin have to be given axes, which torch leaves out where they are all",
)


def amax(x: ir.Value, dim: int | Sequence[int] = (), keepdim: bool = False) -> Any:
    """aten::amax."""
    return _reduced("ReduceMax", x, dim, keepdim)


def amin(x: ir.Value, dim: int | Sequence[int] = (), keepdim: bool = False) -> Any:
    """aten::amin."""
    return _reduced("ReduceMin", x, dim, keepdim)


def _reduced(op_type: str, x: ir.Value, dim: int | Sequence[int], keepdim: bool) -> Any:
    from symbolics.quirks.opset import op

    axes = [dim] if isinstance(dim, int) else list(dim)
    reduce = getattr(op, op_type)
    return reduce(x, axes, keepdims=int(keepdim)) if axes else reduce(x, keepdims=int(keepdim))
