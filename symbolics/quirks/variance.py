"""Variances whose correction is no whole number."""

from __future__ import annotations

from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite

__all__ = ["QUIRK", "VARIANCE", "variance"]

QUIRK = Quirk(upstream="torch", seen="2.13", wrong="TorchScript takes a correction of 0.5 for 0")


def variance(x: torch.Tensor, *args: Any, correction: float | None = None, **kwargs: Any) -> torch.Tensor:
    """torch.var: the sum of squares over the number of elements less the correction."""
    if correction is None or float(correction).is_integer() or not private.is_tracing():
        return torch.var(x, *args, **(kwargs if correction is None else {**kwargs, "correction": correction}))
    mean_square = torch.var(x, *args, correction=0, **kwargs)
    dim = kwargs.get("dim", args[0] if args else None)
    axes = tuple(range(x.dim())) if dim is None else dim
    count = torch.ones_like(x.detach()).sum(axes, keepdim=bool(kwargs.get("keepdim")))
    return mean_square * (count / (count - correction).clamp(min=0))


def _fractional(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return private.is_tracing() and not float(kwargs.get("correction") or 0).is_integer()


def _var(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return variance(*args, **kwargs) if _fractional(func, args, kwargs) else func(*args, **kwargs)


def _with_mean(root: bool) -> Rewrite:
    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _fractional(func, args, kwargs):
            return func(*args, **kwargs)
        _, mean = torch.var_mean(*args, **{**kwargs, "correction": 0})
        spread = variance(*args, **kwargs)
        return (spread.sqrt() if root else spread), mean

    return called


VARIANCE: dict[Any, Rewrite] = {
    torch.var: _var,
    torch.Tensor.var: _var,
    torch.var_mean: _with_mean(root=False),
    torch.std_mean: _with_mean(root=True),
}
