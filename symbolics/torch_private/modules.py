"""What modules and tensors hold beside their values: hooks, buffers, parametrizations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def parametrization_cache() -> dict[Any, Any]:
    """What torch.nn.utils.parametrize.cached() keeps: a run fills it, and the next one calls nothing."""
    import torch.nn.utils.parametrize

    return torch.nn.utils.parametrize._cache


def non_persistent_buffers(module: torch.nn.Module) -> set[str]:
    """The names of a module's buffers that state_dict() leaves out (the live set)."""
    return module._non_persistent_buffers_set


def tensor_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """The hooks on a tensor's gradient, in the order in which they run."""
    return list((tensor._backward_hooks or {}).values())


def post_accumulate_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """The hooks that run once a tensor's .grad is there."""
    return list((tensor._post_accumulate_grad_hooks or {}).values())


def module_backward_hooks(module: torch.nn.Module) -> list[tuple[str, Callable[..., Any]]]:
    """A module's hooks on gradients, those of all modules included, each with the method that registers it."""
    everywhere = torch.nn.modules.module
    full, old = "register_full_backward_hook", "register_backward_hook"
    return [
        *(("register_full_backward_pre_hook", hook) for hook in module._backward_pre_hooks.values()),
        *(("register_module_full_backward_pre_hook", hook) for hook in everywhere._global_backward_pre_hooks.values()),
        *((old if module._is_full_backward_hook is False else full, hook) for hook in module._backward_hooks.values()),
        *(("register_module_full_backward_hook", hook) for hook in everywhere._global_backward_hooks.values()),
    ]
