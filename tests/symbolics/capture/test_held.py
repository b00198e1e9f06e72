"""Parameters and buffers that are held in dicts, lists, objects and closures, too: no capture takes them for constants."""

from __future__ import annotations

import types
import warnings

import pytest
import torch
from torch import nn

import exporter
from symbolics.errors import PythonopWarning
from tests.zoo.steep import Steep


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        for name in "abcdefgh":
            setattr(self, name, nn.Parameter(torch.randn(4)))
        self.register_buffer("shift", torch.randn(4))
        self.table = {"a": self.a, "shift": self.shift}
        self.pair = [self.b, self.c]
        self.settings = types.SimpleNamespace(scale=self.d)
        inner = self.e
        self.step = lambda x: x + inner
        self.rest = {"f": self.f, "g": self.g, "h": self.h}

    def forward(self, x):
        x = x * self.table["a"] + self.table["shift"] + torch.stack(self.pair).prod(0)
        x = self.step(x) * self.settings.scale.detach() + self.settings.scale[None]
        x = Steep.apply(self.rest["f"]) * x
        x = nn.functional.layer_norm(x, (4,), weight=self.rest["g"])
        return x + self.g, self.rest["h"]


@pytest.mark.parametrize("dynamo", [True, False])
def test_wherever_they_are_held(dynamo):
    model, x = Net(), torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PythonopWarning)
        program = exporter.export(model, (x,), dynamo=dynamo)
    assert set(program.model.graph.initializers) >= set(model.state_dict())
    module = exporter.load(program, allow=["tests.*:*"])
    theirs, ours = model(x), module(x)
    torch.testing.assert_close(ours, theirs)
    (theirs[0].sum() + theirs[1].sum()).backward(), (ours[0].sum() + ours[1].sum()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad)


class Other(nn.Module):
    """Under an exporter it goes around one of its parameters."""

    def __init__(self):
        super().__init__()
        self.l, self.gain, self.frozen = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        exporting = torch.compiler.is_exporting() or torch.jit.is_tracing()
        return self.l(x) if exporting else self.l(x) * self.gain * self.frozen


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_parameter_without_its_gradient_is_named(dynamo):
    with pytest.warns(PythonopWarning, match="^'gain': parameters with a gradient in eager mode"):
        exporter.export(Other(), (torch.randn(3, 4),), dynamo=dynamo)
