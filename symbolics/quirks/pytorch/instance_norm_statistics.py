"""InstanceNorm that keeps running statistics, in training mode."""

from __future__ import annotations

from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.quirks.pytorch.mixed_norms import normalized
from symbolics.quirks.pytorch.norms_without_weights import with_weights
from symbolics.quirks.quirk import Quirk

__all__ = ["INSTANCE_NORM", "QUIRK"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="a trace holds instance_norm as one call and nothing of what it writes into the running statistics; torch.export fails on it in onnxruntime's "
    "types or writes it as a BatchNorm of a batch of one",
)


def _instance_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The statistics by calls that are traced, and the norm without them; in evaluation, a BatchNorm of the same statistics."""
    if len(args) < 8 or not (args[5] or private.is_tracing()):
        return normalized(func, args, kwargs)
    x, weight, bias, mean, var, training, momentum, *rest = args
    if not training and mean is not None and var is not None:
        return normalized(torch.batch_norm, (x, *with_weights(mean, weight, bias), mean, var, False, momentum, *rest), kwargs)
    if private.is_tracing() and (weight is None or bias is None):
        weight, bias = with_weights(x.new_ones(x.shape[1]), weight, bias)
    values = torch.ops.pythonop.stop_gradient(x.detach()) if x.requires_grad else x
    axes = list(range(2, x.dim()))
    with torch.no_grad():  # as torch has it: the mean over the batch of what each instance says
        for running, batch in ((mean, torch.mean), (var, torch.var)):
            if running is not None:
                running.mul_(1 - momentum).add_(batch(values.to(running.dtype), axes).mean(0), alpha=momentum)
    return normalized(func, (x, weight, bias, None, None, training, momentum, *rest), kwargs)


INSTANCE_NORM = {torch.instance_norm: _instance_norm}
