"""What entries of `symbolics.quirks.REWRITES` are made of: formulas with the signature of the call that they replace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.node.dtypes import HALVES

__all__ = ["Rewrite", "call", "in_float", "in_place", "instead", "instead_in_torchscript", "stopped", "write"]

Rewrite = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def call(rewrite: Rewrite | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a call, or run what stands in for it."""
    return func(*args, **kwargs) if rewrite is None else rewrite(func, args, kwargs)


def instead(formula: Callable[..., Any], inner: Rewrite | None = None) -> Rewrite:
    """Compute the formula in place of the call; where it returns NotImplemented, or ``out=`` is given, the call stays, or what else stands in for it."""

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = NotImplemented if kwargs.get("out") is not None else formula(*args, **{k: v for k, v in kwargs.items() if k != "out"})
        return call(inner, func, args, kwargs) if result is NotImplemented else result

    return called


def instead_in_torchscript(formula: Callable[..., Any], inner: Rewrite | None = None) -> Rewrite:
    """The same for what torch.onnx.export(dynamo=True) writes rightly."""
    whole = instead(formula, inner)
    return lambda func, args, kwargs: call(whole if private.is_tracing() else inner, func, args, kwargs)


def in_float(formula: Callable[..., Any]) -> Callable[..., Any]:
    """The formula of tensors of one half type in float32, as torch's kernels compute inside, and its results in the half type."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        kinds = {t.dtype for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.is_floating_point()}
        half = kinds.pop() if len(kinds) == 1 else None
        if half not in HALVES:
            return formula(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype is half else t, (args, kwargs))
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(half) if t.dtype is torch.float32 else t, formula(*args, **kwargs))

    return functools.wraps(formula)(computed)


def in_place(rewrite: Rewrite, func: Any) -> Rewrite:
    """The rewrite of ``x.func_(...)``, given that of ``func``."""

    def called(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return write(args[0], rewrite(func, args, kwargs))

    return called


def write(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Give a tensor its next value, and that back."""
    return private.overwrite_traced(tensor, value) if private.is_tracing() else tensor.copy_(value)


def stopped(x: torch.Tensor) -> torch.Tensor:
    """x, through which no gradient flows."""
    return torch.ops.pythonop.stop_gradient(x.detach())
