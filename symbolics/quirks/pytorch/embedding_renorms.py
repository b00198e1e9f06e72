"""Embeddings with max_norm, whose forward writes into their table."""

from __future__ import annotations

import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, in_place

__all__ = ["EMBEDDING_RENORMS", "QUIRK"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript writes the norms of an embedding's rows by attributes that ReduceL2 has no more, and what reads the table later reads the old rows",
)

_EPSILON = 1e-7  # as in torch's kernel


def _renormed(weight: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """The table, its rows that are looked up no longer than ``max_norm``."""
    norms = weight.norm(norm_type, 1, keepdim=True)
    used = torch.zeros_like(norms[:, 0]).scatter(0, indices.reshape(-1), 1.0).unsqueeze(1) > 0
    return torch.where(used & (norms > max_norm), weight * (max_norm / (norms + _EPSILON)), weight)


def _rewrite() -> Rewrite:
    changed = in_place(lambda func, args, kwargs: _renormed(*args, **kwargs), _renormed)
    return lambda func, args, kwargs: changed(func, args, kwargs) if private.is_tracing() else func(*args, **kwargs)


EMBEDDING_RENORMS = {torch.embedding_renorm_: _rewrite()}
