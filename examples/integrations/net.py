"""The network that these examples train: one autograd.Function between two Linears, on 64 points in three classes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import exporter


class Softsign(torch.autograd.Function):
    """x / (1 + |x|), with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        y = x / (1 + x.abs())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y.abs()) ** 2


class Net(nn.Module):
    """(batch, 8) -> (batch, 3); with labels, a dict of the loss and the logits, as transformers' models return."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x, labels=None):
        logits = self.second(Softsign.apply(self.first(x)))
        return logits if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def points() -> tuple[torch.Tensor, torch.Tensor]:
    """The data: points and their classes."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return x, x[:, :3].argmax(1)


def save(path: Path, labels: bool = False) -> None:
    """Export the network; its batch stays open."""
    x, y = points()
    given = {"x": x, "labels": y} if labels else {"x": x}
    shapes = {name: {0: "batch"} for name in given}
    exporter.export(Net(), (), given, dynamic_shapes=shapes).save(path)


def compare(file: list[float], eager: list[float]) -> str:
    """One line: how the losses fell, and how far they were apart at most."""
    gap = max(abs(a - b) for a, b in zip(file, eager, strict=True))
    return f"loss {file[0]:.4f} -> {file[-1]:.4f} from the file, {eager[0]:.4f} -> {eager[-1]:.4f} in eager; largest gap {gap:.1e}"
