"""Where a tensor without dimensions is not 0."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead

__all__ = ["PLACES", "QUIRK"]

QUIRK = Quirk(
    upstream="torch and onnxruntime",
    seen="2.13, 1.31.1",
    wrong="the places of a tensor without dimensions have one coordinate in NonZero, and none in torch",
)


def _places(x: torch.Tensor, *, as_tuple: bool = False) -> torch.Tensor:
    """One row without columns where x is not 0, else none."""
    return NotImplemented if x.dim() or as_tuple else torch.nonzero(x.reshape(1))[:, :0]


PLACES: dict[Any, Rewrite] = dict.fromkeys((torch.argwhere, torch.Tensor.argwhere, torch.nonzero, torch.Tensor.nonzero), instead(_places))
