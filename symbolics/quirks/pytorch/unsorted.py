"""unique(sorted=False) for torch.onnx.export(dynamo=False)."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead_in_torchscript

__all__ = ["QUIRK", "UNSORTED"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript writes unique(sorted=False) along a dimension as a Unique in the order of the elements; eager's is sorted all the same",
)


def _unique(x: torch.Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None) -> Any:
    """Sorted, an order as good as any."""
    return NotImplemented if sorted else torch.unique(x, True, return_inverse, return_counts, dim)


UNSORTED: dict[Any, Rewrite] = {torch.unique: instead_in_torchscript(_unique)}
