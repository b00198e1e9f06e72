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


def _split(x: torch.Tensor, places: Any, dim: int) -> tuple[torch.Tensor, ...]:
    """Slices between the places; equal parts as chunks, whose lengths stay open."""
    if isinstance(places, torch.Tensor):
        with private.paused_capture():
            places = places.tolist()
    if not isinstance(places, Sequence):
        return torch.tensor_split(x, places, dim)
    before = (slice(None),) * (dim % x.dim())
    return tuple(x[(*before, slice(start, end))] for start, end in zip([0, *places], [*places, None]))


def _tensor_split(x: torch.Tensor, indices_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
    places = next((named[name] for name in ("indices", "sections", "tensor_indices_or_sections") if name in named), indices_or_sections)
    return _split(x, places, dim)


def _along(dim: Callable[[int], int]) -> Callable[..., Any]:
    def split(x: torch.Tensor, places: Any = None, **named: Any) -> Any:
        return _split(x, next(iter(named.values()), places), dim(x.dim()))

    return split


_FORMULAS = {
    "tensor_split": _tensor_split,
    "hsplit": _along(lambda rank: min(1, rank - 1)),
    "vsplit": _along(lambda rank: 0),
    "dsplit": _along(lambda rank: 2),
}
SPLITS: dict[Any, Rewrite] = {
    getattr(place, name): instead_in_torchscript(formula) for name, formula in _FORMULAS.items() for place in (torch, torch.Tensor)
}
