"""What torch.export puts in the place of Python's max, min and math.pow."""

from __future__ import annotations

import builtins
import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["own_builtins", "standing_for_builtins"]

_OWN = (max, min, math.pow)
_lock = threading.Lock()
_open: list[tuple[Callable[..., Any], ...]] = []


def _put(functions: tuple[Callable[..., Any], ...]) -> None:
    builtins.max, builtins.min, math.pow = functions


@contextlib.contextmanager
def standing_for_builtins(*functions: Callable[..., Any]) -> Iterator[None]:
    """While the block runs, what torch.export puts in the place of max, min and math.pow, of which nothing public has a say.

    They are those of the whole process. The last export that ends puts Python's own back, whichever began first: torch's puts back what it found.
    """
    from torch.export import _trace

    @contextlib.contextmanager
    def overridden() -> Iterator[None]:
        with _lock:
            _open.append(functions)
            _put(functions)
        try:
            yield
        finally:
            with _lock:
                _open.remove(functions)
                _put(_open[-1] if _open else _OWN)

    before, _trace._override_builtin_ops = _trace._override_builtin_ops, overridden
    try:
        yield
    finally:
        _trace._override_builtin_ops = before


@contextlib.contextmanager
def own_builtins() -> Iterator[None]:
    """While the block runs in an export, max, min and math.pow are Python's own: compilers of Python (numba) know those alone."""
    with _lock:
        before = (builtins.max, builtins.min, math.pow)
        _put(_OWN)
    try:
        yield
    finally:
        with _lock:
            _put(before if before == _OWN or _open else _OWN)
