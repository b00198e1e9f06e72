"""What one run of a loaded file leaves for the next: residuals and contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exporter.runtime.store import ContextStore

__all__ = ["Residuals"]


class Residuals:
    """What one forward leaves for its backward: values, and contexts of PythonOps, which are freed with it.

    Attributes:
        values: name -> value; None once a backward has used them up.
        shared: Whether a backward was differentiable: its graph holds this, and what it names is freed with the last holder.
    """

    def __init__(self, values: dict[str, Any], handles: Sequence[int], store: ContextStore) -> None:
        self.values: dict[str, Any] | None = values
        self.shared = False
        self.below: Residuals | None = None  # whose contexts must live as long
        self._handles = handles
        self._store = store

    def close(self) -> None:
        """Free the contexts."""
        self._store.free_all(self._handles)

    __del__ = close  # weakref.finalize costs 2 us
