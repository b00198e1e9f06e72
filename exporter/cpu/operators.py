"""The accelerator's library of operators, and what the processor makes of it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

__all__ = ["DOMAIN", "has_wide_vectors", "library"]

#: The domain of its operators. No file has them: they are made in memory, where a session is made.
DOMAIN = "pythonop.cpu"


@functools.cache
def _module() -> Any:
    try:
        from exporter.cpu.native import _cpu  # type: ignore[attr-defined]
    except ImportError:  # it was not compiled: standard operators alone
        return None
    return _cpu


def library() -> Path | None:
    """Where the library is; None where it was not compiled."""
    return None if _module() is None else Path(_module().__file__)


def has_wide_vectors() -> bool:
    """Whether the library's products are quicker on this processor than onnxruntime's: it has AVX-512."""
    return _module() is not None and bool(_module().has_wide_vectors())
