"""Draws among several."""

from __future__ import annotations

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import instead

__all__ = ["MULTINOMIAL", "QUIRK"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib",
    seen="0.7.2",
    wrong="multinomial draws with replacement, whatever it is asked for, and its result for one row of weights may have no dimension; TorchScript has none "
    "without replacement",
)


def _multinomial(x: torch.Tensor, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Without replacement, the greatest of weight / exponential draw, as torch draws them. One draw needs no replacement."""
    if replacement and x.dim() == 2:
        return NotImplemented
    if replacement:
        return torch.multinomial(x.unsqueeze(0), num_samples, True).squeeze(0)
    waits = -torch.log(1 - torch.rand_like(x))
    return torch.topk(x / torch.where(waits > 0, waits, torch.full_like(waits, 1e-30)), num_samples).indices


MULTINOMIAL = {torch.multinomial: instead(_multinomial), torch.Tensor.multinomial: instead(_multinomial)}
