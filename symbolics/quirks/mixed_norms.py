"""Normalizations of a half type with parameters in float32, as autocast makes them: in ONNX both are of one type."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["normalized"]

_NORMS = {torch.layer_norm, torch.group_norm, torch.instance_norm, torch.batch_norm}
_HALVES = (torch.float16, torch.bfloat16)


def normalized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result of such a call, in the type that the kernels of PyTorch compute in; None for any other call."""
    if func not in _NORMS or not args or args[0].dtype not in _HALVES:
        return None
    x, *rest = args
    if all(value.dtype is x.dtype for value in (*rest, *kwargs.values()) if isinstance(value, torch.Tensor)):
        return None
    result: torch.Tensor = func(x.float(), *rest, **kwargs)
    return result.to(x.dtype)
