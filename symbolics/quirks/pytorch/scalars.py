"""Tensors without dimensions in torch.onnx.export(dynamo=False)."""

from __future__ import annotations

from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite

__all__ = ["QUIRK", "SCALARS"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript writes constants of one dimension into calls whose arguments have none (the result then has one), and operators that take none; "
    "dynamo's signbit of a number has a dimension",
)


def _of_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result with the shape that it has in eager mode."""
    result = func(*args, **kwargs)
    return result.reshape(()) if private.is_tracing() and isinstance(result, torch.Tensor) and result.dim() == 0 else result


def _as_vector(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A vector of one element, along which to compute."""
    if not private.is_tracing() or not args or not isinstance(args[0], torch.Tensor) or args[0].dim() > 0:
        return func(*args, **kwargs)
    dims = [0 if isinstance(dim, tuple) else dim for dim in args[1:]]  # all that there are: none
    return func(args[0].reshape(1), *dims, **kwargs).reshape(())


def _signbit(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whether it is below 0; the sign of a zero shows in its reciprocal."""
    x = args[0] if args else None
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or kwargs:
        return func(*args, **kwargs)
    return torch.where(x == 0, x.reciprocal(), x) < 0


def _as_it_is(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """There is no dimension to take away."""
    is_scalar = private.is_tracing() and args and isinstance(args[0], torch.Tensor) and args[0].dim() == 0
    return args[0].reshape(()) if is_scalar else func(*args, **kwargs)


_AS_IT_IS = ("squeeze",)
_OF_SHAPE = ("addcmul", "nan_to_num")
_AS_VECTOR = ("softmax", "log_softmax", "cumsum", "logsumexp")
SCALARS: dict[Any, Rewrite] = {
    getattr(place, name): rewrite
    for place in (torch, torch.Tensor)
    for names, rewrite in ((_OF_SHAPE, _of_shape), (_AS_VECTOR, _as_vector), (_AS_IT_IS, _as_it_is), (("signbit",), _signbit))
    for name in names
}
