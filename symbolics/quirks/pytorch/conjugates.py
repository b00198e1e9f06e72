"""Transposing and conjugating operators on real tensors: ``x.mT``, ``x.H``, ``x.mH``, ``x.adjoint()``, ``vdot``; spectral_norm's parametrization writes them."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.quirks.quirk import Quirk

__all__ = ["CONJUGATES", "QUIRK"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="the TorchScript exporter has no translation of them, for real tensors neither",
)


def _transposed(func: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    x = args[0]
    return func(*args, **kwargs) if x.is_complex() or x.dim() < 2 else x.transpose(-2, -1)


def _dot(func: Any, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs) if kwargs or args[0].is_complex() else torch.dot(*args)


_GETTERS = tuple(getattr(torch.Tensor, name).__get__ for name in ("H", "mH", "mT"))

CONJUGATES = {
    **dict.fromkeys((*_GETTERS, torch.Tensor.adjoint, torch.adjoint), _transposed),
    **dict.fromkeys((torch.vdot, torch.Tensor.vdot), _dot),
}
