"""What one run of a loaded file leaves for the next: tensors as a session takes them, residuals and contexts."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from exporter.runtime.store import ContextStore

__all__ = ["Residuals", "ready"]


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
        self.close = weakref.finalize(self, _free, store, tuple(handles))


def _free(store: ContextStore, handles: Iterable[int]) -> None:
    for handle in handles:
        store.free(handle)


def ready(feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors as a session reads them; the caller's list of them must live until the run is over."""
    return {
        name: value
        if value.is_contiguous() and not (value.is_conj() or value.is_neg())
        else value.detach().resolve_conj().resolve_neg().contiguous()
        for name, value in feeds.items()
    }
