"""The functions of torch that the native hot path calls. Some of them are private; each has its reason here."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from exporter.runtime.kernels import LARGE, without_leaf

__all__ = ["FUNCTIONS", "LARGE"]

# torch.set_grad_enabled is a class whose instances restore: 0.5 us against 0.06.
_set_grad_enabled = torch._C._set_grad_enabled

# The engine behind torch.autograd.grad, without the checks that this caller does not need: 11 us against 22.
_run_backward = torch.autograd.Variable._execution_engine.run_backward

# Autocast on any device, in one call.
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled

# What torch.utils.dlpack.from_dlpack ends in, for a capsule: 0.5 us against 1.1.
_from_dlpack = torch._C._from_dlpack


def _release_leaf(leaf: torch.Tensor) -> tuple[torch.Tensor, Any, tuple[int, ...]]:
    value = without_leaf(leaf)
    return value, get_gradient_edge(value), tuple(value.shape)


#: In the order of setup() in native.c.
FUNCTIONS = (
    _from_dlpack,
    torch.utils.dlpack.to_dlpack,
    torch.is_grad_enabled,
    _set_grad_enabled,
    _is_any_autocast_enabled,
    torch.is_inference_mode_enabled,
    _run_backward,
    os.urandom,
    _release_leaf,
    get_gradient_edge,
)
