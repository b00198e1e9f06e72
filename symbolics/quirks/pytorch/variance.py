"""Variances whose correction is no whole number, those of a half type, and the slope of a deviation of 0."""

from __future__ import annotations

from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.node.dtypes import HALVES
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, in_float

__all__ = ["QUIRK", "VARIANCE", "deviation"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript takes a correction of 0.5 for 0, and counts in the type of the tensor: 100000 elements of float16 have the variance NaN; the gradient of "
    "std_mean where all are equal is NaN",
)


@in_float
def variance(x: torch.Tensor, *args: Any, correction: float | None = None, **kwargs: Any) -> torch.Tensor:
    """torch.var: the sum of squares over the number of elements less the correction."""
    if correction is None or float(correction).is_integer() or not private.is_tracing():
        return torch.var(x, *args, **(kwargs if correction is None else {**kwargs, "correction": correction}))
    mean_square = torch.var(x, *args, correction=0, **kwargs)
    dim = kwargs.get("dim", args[0] if args else None)
    axes = tuple(range(x.dim())) if dim is None else dim
    count = torch.ones_like(x.detach()).sum(axes, keepdim=bool(kwargs.get("keepdim")))
    return mean_square * (count / (count - correction).clamp(min=0))


def _is_wrong(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return private.is_tracing() and (args[0].dtype in HALVES or not float(kwargs.get("correction") or 0).is_integer())


def _var(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return variance(*args, **kwargs) if _is_wrong(args, kwargs) else func(*args, **kwargs)


@in_float
def deviation(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """torch.std, whose slope at 0 is 0."""
    return _root(variance(x, *args, **kwargs))


def _root(square: torch.Tensor) -> torch.Tensor:
    """The square root, whose slope at 0 is 0."""
    flat = square == 0
    return torch.where(flat, torch.zeros_like(square), torch.where(flat, torch.ones_like(square), square).sqrt())


def _var_mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _is_wrong(args, kwargs):
        return func(*args, **kwargs)
    _, mean = torch.var_mean(*args, **{**kwargs, "correction": 0})
    return variance(*args, **kwargs), mean


def _std_mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _, mean = _var_mean(torch.var_mean, args, kwargs)
    return deviation(*args, **kwargs), mean


VARIANCE: dict[Any, Rewrite] = {
    torch.var: _var,
    torch.Tensor.var: _var,
    torch.var_mean: _var_mean,
    torch.std_mean: _std_mean,
}
