"""Splits at places, in torch.onnx.export(dynamo=False)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead_in_torchscript

__all__ = ["QUIRK", "SPLITS"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript writes tensor_split at given places as a sequence of unknown length, and has no hsplit, vsplit and dsplit",
)


def _split(x: torch.Tensor, places: Any, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Slices between the places; equal parts as chunks, whose lengths stay open."""
    if isinstance(places, torch.Tensor):
        with private.paused_capture():
            places = places.tolist()
    if not isinstance(places, Sequence):
        return torch.tensor_split(x, places, dim)
    before = (slice(None),) * (dim % x.dim())
    return tuple(x[(*before, slice(start, end))] for start, end in zip([0, *places], [*places, None]))


_FORMULAS: dict[str, Callable[..., Any]] = {
    "tensor_split": _split,
    "hsplit": lambda x, places: _split(x, places, min(1, x.dim() - 1)),
    "vsplit": lambda x, places: _split(x, places, 0),
    "dsplit": lambda x, places: _split(x, places, 2),
}
SPLITS: dict[Any, Rewrite] = {
    getattr(place, name): instead_in_torchscript(formula) for name, formula in _FORMULAS.items() for place in (torch, torch.Tensor)
}
