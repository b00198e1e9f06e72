"""BatchNorm and InstanceNorm without weights or without running statistics, behind a call of a Function."""

from __future__ import annotations

from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.node.dtypes import HALVES
from symbolics.quirks.pytorch.mixed_norms import normalized
from symbolics.quirks.quirk import Quirk

__all__ = ["BATCH_NORM", "QUIRK", "with_weights"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="dynamo=False writes the weights or statistics that batch_norm and instance_norm are called without as constants, and refuses both where the sizes "
    "of their input are not known: behind a Function",
)


def _batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) < 9 or not (private.is_tracing() or args[0].dtype in HALVES):
        return normalized(func, args, kwargs)
    x, weight, bias, mean, var, training, momentum, eps, *rest = args
    if mean is None or var is None:  # then its statistics are the batch's, which dynamo's translation rounds to a half type
        return _by_statistics(x, weight, bias, eps)
    if not private.is_tracing():
        return normalized(func, args, kwargs)
    return normalized(func, (x, *with_weights(mean, weight, bias), mean, var, training, momentum, eps, *rest), kwargs)


def with_weights(like: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A norm's weight and bias; those that it is called without as ones and zeros like a tensor of one number a channel."""
    return torch.ones_like(like) if weight is None else weight, torch.zeros_like(like) if bias is None else bias


def _by_statistics(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The norm as it is defined: (x - mean) / sqrt(var + eps) * weight + bias, over all axes but the channels'; half types in float32, as torch has it."""
    wide = x.float() if x.dtype in HALVES else x
    axes, each = [0, *range(2, x.dim())], [1, -1] + [1] * (x.dim() - 2)
    centred = wide - wide.mean(axes, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(axes, keepdim=True) + eps)
    y = y if weight is None else y * weight.to(y.dtype).view(each)
    y = y if bias is None else y + bias.to(y.dtype).view(each)
    return y.to(x.dtype)


BATCH_NORM = {torch.batch_norm: _batch_norm}
