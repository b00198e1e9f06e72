"""Norms, distances and angles between vectors: their values, and their gradients where a norm is 0."""

from __future__ import annotations

import math
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.node.dtypes import HALVES
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import instead, stopped

__all__ = ["DISTANCES", "QUIRK"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="p-norms are sums of powers under a root, whose gradient at 0 is NaN; linalg.norm drops keepdim; TorchScript's pairwise_distance and cdist "
    "forget the absolute value, dynamo has no cdist; the gradient of cosine_similarity at a row of zeros is not torch's",
)

_WRITTEN = (0.0, 1.0, 2.0, math.inf, -math.inf)  # norms that are one node, whose gradient rule knows zeros


def _vector_norm(
    x: torch.Tensor, ord: float = 2, dim: int | tuple[int, ...] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """torch.linalg.vector_norm; nothing flows into a vector of zeros. The powers of a half type are float32's, as in torch's kernel."""
    p = float(ord)
    x = x if dtype is None else x.to(dtype)
    if p in _WRITTEN or p < 0 or not x.is_floating_point() or x.dim() == 0:
        return NotImplemented
    if x.dtype in HALVES:
        return _vector_norm(x.float(), p, dim, keepdim).to(x.dtype)
    size = x.abs()
    if p < 1:  # the slope of |x|^p is infinite at 0: torch takes 0
        zero = x == 0
        powers = torch.where(zero, torch.zeros_like(x), torch.where(zero, torch.ones_like(x), size) ** p)
    else:
        powers = size**p
    total = powers.sum(dim=_every(x) if dim is None else dim, keepdim=keepdim)
    none = total == 0
    return torch.where(none, torch.zeros_like(total), torch.where(none, torch.ones_like(total), total) ** (1 / p))


def _every(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(range(x.dim()))


def _any_norm(
    x: torch.Tensor, p: float, dim: int | tuple[int, ...] | None, keepdim: bool, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if x.dim() == 0:  # a vector of one element
        return _any_norm(x.reshape(1), p, 0, False, dtype)
    found = _vector_norm(x, p, dim, keepdim, dtype=dtype)
    if found is not NotImplemented:
        return found
    return torch.linalg.vector_norm(x, p, _every(x) if dim is None else dim, keepdim, dtype=dtype)


def _norm(A: torch.Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """torch.linalg.norm, where it is that of a vector."""
    axes = 0 if dim is None else 1 if isinstance(dim, int) else len(dim)
    if ord is None or (ord == "fro" and (axes == 2 or (axes == 0 and A.dim() == 2))):
        return _any_norm(A, 2.0, dim, keepdim, dtype)
    if not isinstance(ord, str) and (axes == 1 or (axes == 0 and A.dim() == 1)):
        return _any_norm(A, ord, dim, keepdim, dtype)
    return NotImplemented


def _matrix_norm(
    A: torch.Tensor, ord: Any = "fro", dim: tuple[int, int] = (-2, -1), keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    return _any_norm(A, 2.0, tuple(dim), keepdim, dtype) if ord == "fro" else NotImplemented


def _pairwise(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> torch.Tensor:
    return _any_norm(x1 - x2 + eps, p, -1, keepdim)


def _dist(x: torch.Tensor, other: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    return _any_norm(x - other, p, None, False)


def _cdist(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> torch.Tensor:
    """Between each row of one and each of the other. With p = inf each of equal extrema has all of the gradient."""
    apart = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    if p == 0:
        return (apart != 0).to(apart.dtype).sum(-1) + 0 * apart.sum(-1)
    if not math.isinf(p):
        return _any_norm(apart, p, -1, False)
    sizes = apart.abs()
    most = stopped(sizes.amax(-1, keepdim=True))
    return most.squeeze(-1) + torch.where(sizes == most, sizes - most, torch.zeros_like(sizes)).sum(-1)


def _cosine(x1: torch.Tensor, x2: torch.Tensor, dim: int = 1, eps: float = 1e-8) -> torch.Tensor:
    """The gradient of a norm ignores that it is eps at least."""
    dtype = torch.promote_types(x1.dtype, x2.dtype)

    def unit(x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, 2, dim, True)
        return x / (norm + stopped(norm.clamp(min=eps) - norm))

    one, two = torch.broadcast_tensors(x1.to(dtype), x2.to(dtype))
    if one.dim() == 0:
        one, two, dim = one.reshape(1), two.reshape(1), 0
    return (unit(one) * unit(two)).sum(dim)


def _cosine_loss(x1: torch.Tensor, x2: torch.Tensor, target: torch.Tensor, margin: float = 0.0, reduction: int = 0) -> torch.Tensor:
    """1 - cos where the target is 1, cos beyond the margin where it is -1; of squared norms, 1e-12 more than they are."""
    squares = ((x1 * x1).sum(-1) + 1e-12) * ((x2 * x2).sum(-1) + 1e-12)
    cosine = (x1 * x2).sum(-1) / squares.sqrt()
    none = torch.zeros_like(cosine)
    each = torch.where(target == 1, 1 - cosine, none) + torch.where(target == -1, (cosine - margin).clamp(min=0), none)
    return each if reduction == 0 else each.mean() if reduction == 1 else each.sum()


DISTANCES = {
    torch.linalg.vector_norm: instead(_vector_norm),
    torch.linalg.norm: instead(_norm),
    torch.linalg.matrix_norm: instead(_matrix_norm),
    torch.pairwise_distance: instead(_pairwise),
    torch.dist: instead(_dist),
    torch.Tensor.dist: instead(_dist),
    private.inner_function("cdist"): instead(_cdist),
    torch.cosine_similarity: instead(_cosine),
    torch.cosine_embedding_loss: instead(_cosine_loss),
}
