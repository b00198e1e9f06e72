"""A spiking network for small images, and what `pythonop step` needs to know of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import exporter
from examples.web.digits import SIZE

NEURONS, TIMES, CLASSES, BATCH = 40, 7, 10, 64
SLOPE, DECAY, THRESHOLD = 10.0, 0.85, 1.0


class Spike(torch.autograd.Function):
    """1 above the threshold, 0 below. Its derivative is 0 almost everywhere: backward has that of a fast sigmoid in its place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad / (1 + SLOPE * x.abs()) ** 2


class Network(nn.Module):
    """Leaky neurons that see an image for a few time steps; (batch, pixels) -> (batch, classes), spikes (batch, times, neurons)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(SIZE * SIZE, NEURONS), nn.Linear(NEURONS, CLASSES)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        current = self.inner(image)
        potential, fired = torch.zeros_like(current), []
        for _ in range(TIMES):
            potential = DECAY * potential + current
            spikes = Spike.apply(potential - THRESHOLD)
            potential = potential - THRESHOLD * spikes
            fired.append(spikes)
        trains = torch.stack(fired, 1)
        return self.outer(trains.mean(1)), trains


def loss(output: tuple[torch.Tensor, torch.Tensor], label: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the classes; the second output, the spikes, is there to be drawn."""
    return nn.functional.cross_entropy(output[0], label)


def case() -> exporter.Case:
    """What ``pythonop step examples.web.model:case`` exports."""
    torch.manual_seed(0)
    example = torch.zeros(BATCH, SIZE * SIZE), torch.zeros(BATCH, dtype=torch.int64)
    return exporter.Case(Network(), example[:1], targets=example[1:], loss=loss, dynamic_shapes=({0: "batch"},))
