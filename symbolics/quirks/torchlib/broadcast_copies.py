"""copy_ of a value of another shape or type, for torch.onnx.export(dynamo=True)."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "copy"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib",
    seen="0.7.2",
    wrong="x.copy_(y) gives y in its own shape and type, where torch expands it to the shape of x and converts it to its type",
)


def copy(x: ir.Value, y: ir.Value, non_blocking: bool = False) -> Any:
    """aten::copy."""
    from symbolics.quirks.opset import op

    value = y if x.dtype == y.dtype else op.CastLike(y, x)
    alike = x.shape is not None and y.shape is not None and x.shape == y.shape
    return op.Identity(value) if alike else op.Expand(value, op.Shape(x))
