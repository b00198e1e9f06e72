"""Reading a model and its data while other processes save to the same path."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from exporter.files.save import between_saves
from symbolics.errors import PythonopError

__all__ = ["steady"]

T = TypeVar("T")

#: Where nothing can be locked (Windows; savers that are not ours), a file may be replaced under every one of them.
_TRIES = 20


def steady(source: Any, read: Callable[[], T]) -> T:
    """What ``read`` makes of a model. Where it fails and the file is another one than before, it is called again, while no save of ours
    puts a file into the folder: a save removes the data of the model that it replaces, which somebody may be about to read.

    Args:
        source: What is read; anything but a path is read once.
        read: Reads it, with all data. What a call that failed has left must not matter to the next.

    Raises:
        PythonopError, OSError: What ``read`` raises.
    """
    if not isinstance(source, (str, os.PathLike)):
        return read()
    for left in reversed(range(_TRIES)):
        with between_saves(Path(source).parent) if left < _TRIES - 1 else contextlib.nullcontext():
            before = _identity(source)
            try:
                return read()
            except (PythonopError, OSError):
                if not left or _identity(source) == before:
                    raise
    raise AssertionError("unreachable")


def _identity(path: str | os.PathLike[str]) -> tuple[int, ...] | None:
    with contextlib.suppress(OSError, ValueError):
        found = os.stat(path)
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
    return None
