"""Python's garbage collector, while a graph is built."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["without_gc"]


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Thousands of new objects, none of them garbage, make Python search its whole heap again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
