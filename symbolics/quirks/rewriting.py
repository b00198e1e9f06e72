"""What entries of `symbolics.quirks.REWRITES` are made of: formulas with the signature of the call that they replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from symbolics import torch_private as private

__all__ = ["Rewrite", "in_place", "instead", "instead_in_torchscript", "stopped"]

Rewrite = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def instead(formula: Callable[..., Any], inner: Rewrite | None = None) -> Rewrite:
    """Compute the formula in place of the call; where it returns NotImplemented, or ``out=`` is given, the call stays, or what else stands in for it."""

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = NotImplemented if kwargs.get("out") is not None else formula(*args, **{k: v for k, v in kwargs.items() if k != "out"})
        if result is not NotImplemented:
            return result
        return func(*args, **kwargs) if inner is None else inner(func, args, kwargs)

    return called


def instead_in_torchscript(formula: Callable[..., Any], inner: Rewrite | None = None) -> Rewrite:
    """The same for what torch.onnx.export(dynamo=True) writes rightly."""
    whole, other = instead(formula, inner), inner or _as_called
    return lambda func, args, kwargs: (whole if private.is_tracing() else other)(func, args, kwargs)


def _as_called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def in_place(rewrite: Rewrite, func: Any) -> Rewrite:
    """The rewrite of ``x.func_(...)``, given that of ``func``."""

    def called(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = rewrite(func, args, kwargs)
        return private.overwrite_traced(args[0], value) if private.is_tracing() else args[0].copy_(value)

    return called


def stopped(x: torch.Tensor) -> torch.Tensor:
    """x, through which no gradient flows."""
    return torch.ops.pythonop.stop_gradient(x)
