"""BatchNorm with momentum=None, whose running statistics are the average of all batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "cumulative_statistics", "momentum_of_this_step"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="BatchNorm computes the momentum of momentum=None from data, its counter of batches: torch.export fails at that",
)

# Of InstanceNorm, None means 0.
_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


def cumulative_statistics(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Names of the running means that a forward makes the average of all batches so far (momentum=None), with their modules."""
    return {
        f"{path}.running_mean".removeprefix("."): module
        for path, module in model.named_modules()
        if isinstance(module, _NORMS)
        and module.training
        and module.momentum is None
        and module.track_running_stats
        and module.num_batches_tracked is not None
    }


@contextlib.contextmanager
def momentum_of_this_step(model: torch.nn.Module) -> Iterator[None]:
    """Let an export see the number that momentum=None stands for at the next step.

    The file says by `CUMULATIVE_KEY` that it was none; the counter is among the model's buffers.
    """
    norms = list(cumulative_statistics(model).values())
    for norm in norms:
        norm.momentum = 1.0 / (float(norm.num_batches_tracked) + 1.0)  # type: ignore[arg-type, assignment]
    try:
        yield
    finally:
        for norm in norms:
            norm.momentum = None  # type: ignore[assignment]
