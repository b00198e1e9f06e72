"""Normalizations of a half type with parameters in float32, as autocast makes them."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.node.dtypes import HALVES
from symbolics.quirks.quirk import Quirk

__all__ = ["MIXED_NORMS", "QUIRK", "normalized"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="a norm of a half type with parameters in float32 is written as one ONNX node, whose inputs must be of one type",
)


def normalized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same in float32, the type that the kernels of PyTorch compute in."""
    if not args or (x := args[0]).dtype not in HALVES:
        return func(*args, **kwargs)
    if all(value.dtype is x.dtype for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)):
        return func(*args, **kwargs)
    return func(x.float(), *args[1:], **kwargs).to(x.dtype)


MIXED_NORMS = dict.fromkeys((torch.layer_norm, torch.group_norm), normalized)
