"""Whether any element is true, and whether all are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead

__all__ = ["QUIRK", "TRUTH"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="TorchScript's any takes what is below 1 for false; any of nothing is true under dynamo",
)


def _count(true: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
    ones = true.to(torch.int64)
    return ones.sum() if dim is None else ones.sum(dim, keepdim=keepdim)


def _any(x: torch.Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> torch.Tensor:
    """More than none of them differs from 0."""
    if x.dtype is torch.uint8 or x.dim() == 0 or (dim is not None and not isinstance(dim, int) and not len(dim)):
        return _of_one(x)
    return _count(x if x.dtype is torch.bool else x != 0, dim, keepdim) > 0


def _all(x: torch.Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> torch.Tensor:
    """None of them is 0."""
    if x.dtype is torch.uint8 or x.dim() == 0 or (dim is not None and not isinstance(dim, int) and not len(dim)):
        return _of_one(x)
    return _count(x == 0, dim, keepdim) == 0


def _of_one(x: torch.Tensor) -> Any:
    return x != 0 if x.dim() == 0 and x.dtype is not torch.uint8 else NotImplemented


_ANY, _ALL = instead(_any), instead(_all)
TRUTH: dict[Any, Rewrite] = {torch.any: _ANY, torch.Tensor.any: _ANY, torch.all: _ALL, torch.Tensor.all: _ALL}
