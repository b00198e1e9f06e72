"""Python's max, min, math.pow and math.sqrt while torch.export captures."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import stopped

__all__ = ["QUIRK", "builtins_of_eager", "builtins_of_sizes"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.15",
    wrong="torch.export replaces max, min and math.pow in the whole process: math.pow(2, 3) is an int then, max of three sizes makes a condition of them, "
    "max(x) of a vector fails, of equal tensors it shares the gradient, and numba compiles no function that calls one of them, not even later; math.sqrt of an open size makes a number of it",
)

_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
_max, _min, _pow, _sqrt = max, min, math.pow, math.sqrt


def _extreme(own: Callable[..., Any], of_sizes: Callable[..., Any], wins: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """`own`, of tensors and sizes, too: the first of equal ones, as it is."""

    def two(first: Any, second: Any) -> Any:
        if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
            return torch.where(wins(second, first), second, first)
        return of_sizes(first, second) if isinstance(first, _SIZES) or isinstance(second, _SIZES) else own(first, second)

    @functools.wraps(own)
    def called(*args: Any, **kwargs: Any) -> Any:
        if "key" in kwargs or not args:
            return own(*args, **kwargs)
        one = len(args) == 1
        items = list(args[0]) if one else args
        if items and any(isinstance(item, (torch.Tensor, *_SIZES)) for item in items):
            return functools.reduce(two, items)
        return own(items, **kwargs) if one else own(*items, **kwargs)

    return called


def _power(x: Any, y: Any, /) -> Any:
    """math.pow: a float whatever is given, and no gradient flows through it."""
    if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
        return stopped((x**y).to(torch.get_default_dtype()))
    if isinstance(x, _SIZES) or isinstance(y, _SIZES):
        return torch.sym_float(x) ** torch.sym_float(y)
    return _pow(x, y)


def _root(x: Any, /) -> Any:
    """math.sqrt, which makes a number of a size that is open."""
    return torch.sym_sqrt(x) if isinstance(x, _SIZES) else _sqrt(x)


_FUNCTIONS = (
    _extreme(_max, torch.sym_max, lambda second, first: second > first),
    _extreme(_min, torch.sym_min, lambda second, first: second < first),
    _power,
    _root,
)


def builtins_of_eager(_: torch.nn.Module) -> AbstractContextManager[None]:
    """While the block runs, torch.export takes these in place of its own."""
    return private.standing_for_builtins(*_FUNCTIONS)


def builtins_of_sizes() -> AbstractContextManager[None]:
    """While the block runs, they are these, of sizes, too."""
    return private.put_builtins(*_FUNCTIONS)
