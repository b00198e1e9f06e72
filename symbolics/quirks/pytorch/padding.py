"""Circular padding that cuts off."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import instead_in_torchscript

__all__ = ["PADDING", "QUIRK"]

QUIRK = Quirk(upstream="torch", seen="2.13", wrong="TorchScript's circular pad with a negative amount gives another shape")


def _pad(x: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> torch.Tensor:
    """Cut off, then pad: what comes in is of what is left."""
    if mode != "circular" or all(amount >= 0 for amount in pad):
        return NotImplemented
    for position, amount in enumerate(pad):
        axis = -1 - position // 2
        if amount < 0:
            x = x.narrow(axis, -amount if position % 2 == 0 else 0, x.shape[axis] + amount)
    padded: torch.Tensor = functional.pad(x, [max(amount, 0) for amount in pad], mode, value)
    return padded


PADDING = {private.inner_function("pad"): instead_in_torchscript(_pad)}
