"""What the native hot path calls, looked up once."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from exporter.runtime.kernels import LARGE, without_leaf
from symbolics import torch_private as private
from symbolics.errors import RunError

__all__ = ["FUNCTIONS", "THREADS", "connect"]


def _release_leaf(leaf: torch.Tensor) -> tuple[torch.Tensor, Any, tuple[int, ...]]:
    value = without_leaf(leaf)
    return value, get_gradient_edge(value), tuple(value.shape)


#: In the order of setup() in native.c.
FUNCTIONS = (
    private.from_dlpack,
    torch.to_dlpack,  # type: ignore[attr-defined]
    torch.is_grad_enabled,
    private.set_grad_enabled,
    private.is_any_autocast_enabled,
    torch.is_inference_mode_enabled,
    private.run_backward,
    os.urandom,
    _release_leaf,
    get_gradient_edge,
    private.weak_storage,
    private.release_weak_storage,
    private.own_memory,
)

#: In the order of threads() in threads.h.
THREADS = private.openmp_functions()


@functools.cache
def connect() -> None:
    """Hand them to the native library, once."""
    from exporter.runtime.native import _native  # type: ignore[attr-defined]

    _native.setup(*FUNCTIONS, RunError, LARGE)
    _native.threads(*THREADS)
    if hasattr(os, "register_at_fork"):  # a child has none of the threads, and waking them would wait forever
        os.register_at_fork(after_in_child=lambda: _native.threads(*THREADS[:3], 0, *THREADS[4:]))
