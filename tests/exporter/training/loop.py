"""Two loops over the same batches, a training step in onnxruntime and eager PyTorch, and a small network for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import exporter
from exporter.training.step import TrainingStep, export_training_step

__all__ = ["Custom", "Square", "batches_of", "eager", "network", "run", "step_of"]


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
    *, arguments: int = 1, clip_norm: float | None = None, clip_value: float | None = None, accumulate: int = 1,
) -> list[float]:  # fmt: skip
    """The same in eager PyTorch."""
    losses = []
    for number, batch in enumerate(batches, 1):
        value = loss(model(*batch[:arguments]), *batch[arguments:])
        (value / accumulate).backward()
        if number % accumulate == 0:
            if clip_value is not None:
                torch.nn.utils.clip_grad_value_(model.parameters(), clip_value)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(value))
    return losses


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A classifier of four features."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batches_of(count: int, dtype: torch.dtype = torch.float64, size: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches for it."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(size, 4, dtype=dtype, generator=generator) for _ in range(count)]
    return [(x, torch.randint(0, 3, (size,), generator=generator)) for x in inputs]


def step_of(model: nn.Module, batch: Sequence[torch.Tensor], **options: Any) -> TrainingStep:
    """Its training step, with the loss of a classifier."""
    return export_training_step(model, batch[:1], loss=F.cross_entropy, targets=batch[1:], **options)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] * g  # not the derivative of forward, on purpose


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(Square.apply(self.first(x)))
