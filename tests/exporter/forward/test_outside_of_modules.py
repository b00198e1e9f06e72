"""Opaque modules, and what stands outside of their calls: state that a Function writes unsaid, values of their classes."""

from __future__ import annotations

import pytest
import torch

import exporter


class Normalized(torch.autograd.Function):
    """Statistics written in place, and not declared, as synchronized batch norms have them."""

    @staticmethod
    def forward(ctx, x, mean):
        mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x - x.mean(0)

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0), None


class KeepsMean(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        return Normalized.apply(self.linear(x), self.mean)


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_buffer_that_a_function_writes_unsaid(dynamo):
    """Of the Function alone a warning, which names the way: the module around it as one node."""
    model = torch.nn.Sequential(KeepsMean(), torch.nn.Linear(3, 2))
    with pytest.warns(exporter.PythonopWarning, match=r"'0.mean'.*opaque=\[that module\]"):
        exporter.export(model, (torch.randn(4, 3),), dynamo=dynamo)
    report = exporter.verify(model, (torch.randn(4, 3),), dynamo=dynamo, opaque=[KeepsMean])
    assert report.ok and "buffer" in {row.kind for row in report.rows}


class Based(torch.nn.Module):
    shift = 1.0
    kind = "up"


class Scaled(Based):
    scale = 2.0

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x) * self.scale + (self.shift if self.kind == "up" else -self.shift)


@pytest.mark.parametrize("dynamo", [True, False])
def test_values_of_the_class_are_those_of_the_export(dynamo, monkeypatch):
    """Set by the program: another process has what the source says."""
    model, x = torch.nn.Sequential(Scaled(), torch.nn.Linear(3, 2)), torch.randn(4, 3)
    monkeypatch.setattr(Scaled, "scale", 5.0)
    monkeypatch.setattr(Based, "shift", -3.0)
    monkeypatch.setattr(Scaled, "kind", "down", raising=False)
    report = exporter.verify(model, (x,), dynamo=dynamo, opaque=[Scaled])
    assert report.ok
