"""Draws among several."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead

__all__ = ["MULTINOMIAL", "QUIRK"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib",
    seen="0.7.2",
    wrong="multinomial draws with replacement, whatever it is asked for, and its result for one row of weights may have no dimension; TorchScript has none "
    "without replacement, and neither has randperm",
)


def _multinomial(x: torch.Tensor, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Without replacement, the greatest of weight / exponential draw, as torch draws them. One draw needs no replacement."""
    if replacement and x.dim() == 2:
        return NotImplemented
    if replacement:
        return torch.multinomial(x.unsqueeze(0), num_samples, True).squeeze(0)
    waits = -torch.log(1 - torch.rand_like(x))
    return torch.topk(x / torch.where(waits > 0, waits, torch.full_like(waits, 1e-30)), num_samples).indices


def _permutation(
    n: int, *, generator: torch.Generator | None = None, dtype: torch.dtype = torch.int64, device: Any = None, **_: Any
) -> torch.Tensor:
    """The order of as many draws."""
    return torch.rand(n, device=device).argsort().to(dtype)


MULTINOMIAL: dict[Any, Rewrite] = {
    torch.multinomial: instead(_multinomial),
    torch.Tensor.multinomial: instead(_multinomial),
    torch.randperm: instead(_permutation),
}
