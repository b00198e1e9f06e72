"""Norms without weights, or without running statistics, behind a Function: a trace knows no sizes there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import exporter


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, g):
        return g / 2


NORMS = {
    "batch norm, no weights": lambda: nn.BatchNorm2d(5, affine=False),
    "batch norm, no statistics": lambda: nn.BatchNorm2d(5, track_running_stats=False),
    "batch norm, neither": lambda: nn.BatchNorm2d(5, affine=False, track_running_stats=False),
    "instance norm, no weights": lambda: nn.InstanceNorm2d(5),
    "instance norm, statistics": lambda: nn.InstanceNorm2d(5, affine=True, track_running_stats=True),
    "instance norm, statistics alone": lambda: nn.InstanceNorm2d(5, track_running_stats=True),
}


class Net(nn.Module):
    def __init__(self, norm) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 5, 1), norm

    def forward(self, x):
        return self.norm(Half.apply(self.conv(x)))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norms_behind_a_function_are_eagers(norm, dynamo, training):
    torch.manual_seed(0)
    model = Net(norm()).train(training)
    for buffer in model.buffers():
        buffer.copy_(buffer + torch.rand(buffer.shape)) if buffer.is_floating_point() else None
    eager, sizes = copy.deepcopy(model), {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    program = exporter.export(model, (torch.randn(3, 6, 4, 4),), dynamo=dynamo, dynamic_shapes=sizes)
    loaded = exporter.load(program, allow=[f"{__name__}:*"]).train(training)
    x = torch.randn(7, 6, 4, 4)
    weights = torch.randn(7, 5, 4, 4)
    for each in (eager, loaded):
        each.out = each(x)
        (each.out * weights).sum().backward()
    torch.testing.assert_close(loaded.out, eager.out, rtol=1e-5, atol=1e-5)
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-4)
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(loaded.get_buffer(name), buffer, rtol=1e-5, atol=1e-5)
