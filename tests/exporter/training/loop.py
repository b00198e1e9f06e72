"""Two loops over the same batches: a training step in onnxruntime, and eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import exporter
from exporter.training.step import TrainingStep

__all__ = ["eager", "run"]


def run(
    step: TrainingStep, batches: Sequence[Sequence[torch.Tensor]], *, allow: Any = (), **more: Any
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of a loop, and the state after it; a batch holds the arguments, then the targets."""
    session = exporter.inference_session(step.model, allow=allow)
    names = [output.name for output in session.get_outputs()]
    layout = step.layout
    assert layout is not None
    state, losses = {**step.initial, **more}, []
    for batch in batches:
        feeds = dict(zip((*layout.inputs, *layout.targets), (t.numpy() for t in batch), strict=True))
        results = dict(zip(names, session.run(None, {**state, **feeds}), strict=True))
        state.update({name: results[output] for output, name in layout.carried.items()})
        losses.append(float(results[layout.loss]))
    return losses, state


def eager(
    model: torch.nn.Module, loss: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, batches: Sequence[Sequence[torch.Tensor]],
    *, arguments: int = 1, clip_norm: float | None = None, accumulate: int = 1,
) -> list[float]:  # fmt: skip
    """The same in eager PyTorch."""
    losses = []
    for number, batch in enumerate(batches, 1):
        value = loss(model(*batch[:arguments]), *batch[arguments:])
        (value / accumulate).backward()
        if number % accumulate == 0:
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(value))
    return losses
