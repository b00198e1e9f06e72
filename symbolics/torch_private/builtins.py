"""What stands in the place of Python's max, min, math.pow, math.sqrt and len while a model is traced."""

from __future__ import annotations

import builtins
import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

__all__ = ["own_builtins", "put_builtins", "standing_for_builtins", "standing_for_len"]

_OWN = (max, min, math.pow, math.sqrt)
_lock = threading.Lock()
_open: list[tuple[Callable[..., Any], ...]] = []
#: Modules of Python whose `len` is another, by id: the module, that function, and how many blocks want it.
_shadowed: dict[int, tuple[ModuleType, Callable[..., Any], int]] = {}


def _put(functions: tuple[Callable[..., Any], ...]) -> None:
    builtins.max, builtins.min, math.pow, math.sqrt = functions


@contextlib.contextmanager
def put_builtins(*functions: Callable[..., Any]) -> Iterator[None]:
    """While the block runs, these are max, min, math.pow and math.sqrt of the whole process.

    The last block that ends puts Python's own back, whichever began first.
    """
    with _lock:
        _open.append(functions)
        _put(functions)
    try:
        yield
    finally:
        with _lock:
            _open.remove(functions)
            _put(_open[-1] if _open else _OWN)


@contextlib.contextmanager
def standing_for_builtins(*functions: Callable[..., Any]) -> Iterator[None]:
    """While the block runs, what torch.export puts in the place of max, min, math.pow and math.sqrt, of which nothing public has a say."""
    from torch.export import _trace

    before, _trace._override_builtin_ops = _trace._override_builtin_ops, lambda: put_builtins(*functions)
    try:
        yield
    finally:
        _trace._override_builtin_ops = before


@contextlib.contextmanager
def standing_for_len(function: Callable[..., Any], modules: Iterable[ModuleType]) -> Iterator[None]:
    """While the block runs, `len` in these modules of Python is the function; not where a module has a `len` of its own."""
    ours: list[ModuleType] = []
    with _lock:
        for module in modules:
            count = _shadowed[id(module)][2] if id(module) in _shadowed else 0
            if count or "len" not in vars(module):
                vars(module)["len"] = function
                _shadowed[id(module)] = (module, function, count + 1)
                ours.append(module)
    try:
        yield
    finally:
        with _lock:
            for module in ours:
                count = _shadowed.pop(id(module))[2] - 1
                if count:
                    _shadowed[id(module)] = (module, function, count)
                else:
                    vars(module).pop("len", None)


@contextlib.contextmanager
def own_builtins() -> Iterator[None]:
    """While the block runs in an export, max, min, math.pow, math.sqrt and len are Python's own: compilers of Python (numba) know those alone."""
    with _lock:
        before = (builtins.max, builtins.min, math.pow, math.sqrt)
        _put(_OWN)
        for module, _, _ in _shadowed.values():
            vars(module).pop("len", None)
    try:
        yield
    finally:
        with _lock:
            _put(before if before == _OWN or _open else _OWN)
            for module, function, _ in _shadowed.values():
                vars(module)["len"] = function
