"""squeeze of an axis that is not 1, for torch.onnx.export(dynamo=True)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "squeeze"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib",
    seen="0.7.2",
    wrong="squeeze of an axis that is not 1, which leaves it in torch, is a Squeeze of it, which no runtime takes",
)


def squeeze(x: ir.Value, dim: int | Sequence[int]) -> Any:
    """aten::squeeze.dim and aten::squeeze.dims; an open axis is not 1, for torch.export would have settled it."""
    from symbolics.quirks.opset import op

    axes = [dim] if isinstance(dim, int) else list(dim)
    ones = axes if x.shape is None else [axis for axis in axes if len(x.shape) and x.shape[axis] == 1]
    return op.Squeeze(x, ones) if ones else op.Identity(x)
