"""The Gaussian's negative log likelihood."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import instead, stopped

__all__ = ["GAUSSIAN_NLL", "QUIRK"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="gaussian_nll_loss looks at its variances, which no export by dynamo can, and changes them in place without gradients, through which TorchScript's "
    "file has none",
)


def _loss(
    input: torch.Tensor, target: torch.Tensor, var: torch.Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> torch.Tensor:
    """(log v + (x - t)^2 / v) / 2. That v is eps at least does not change its gradient."""
    if reduction not in ("none", "mean", "sum"):
        return NotImplemented
    if not isinstance(var, torch.Tensor):
        var = var * torch.ones_like(input)
    if var.dim() == input.dim() - 1:
        var = var.unsqueeze(-1)
    elif var.dim() != input.dim():
        return NotImplemented  # refused by torch
    var = var + stopped(var.clamp(min=eps) - var)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


GAUSSIAN_NLL = {functional.gaussian_nll_loss: instead(_loss)}
