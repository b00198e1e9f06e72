"""Where every warning is an error, as in the tests of many libraries: torch's remarks about itself stop no export."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import exporter
from exporter.forward.case import Case
from exporter.verification.eager import EagerStep
from tests.zoo.functions import Cube


class Net(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        found = self.inner(x)
        return Cube.apply(found[0] if isinstance(found, tuple) else found)


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = x.requires_grad_()
        return torch.autograd.grad(Cube.apply(self.linear(x)).sum(), x, create_graph=True)[0]


MODELS = {
    "BatchNorm that trains": Net(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).train(),
    "LSTM": Net(nn.LSTM(4, 4, batch_first=True)),
    "attention": Net(Attention(4, 2, batch_first=True)).eval(),
    "autograd.grad in forward": Slope(),
}


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_an_export_and_its_gradients(name, dynamo, portable, tmp_path):
    model = MODELS[name]
    x = torch.randn(3, 5, 4) if name in ("LSTM", "attention") else torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = exporter.export(model, (x,), dynamo=dynamo, portable=portable)
        exporter.build_gradient_graph(program)
        program.save(tmp_path / "model.onnx")
        module = exporter.load(tmp_path / "model.onnx", allow=["tests.*"])
        module(x).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.cond(x.norm() > 3.0, lambda x: self.one(x), lambda x: self.other(x), (x,))


def test_modules_in_the_branches_of_a_cond():
    """Dynamo compiles the branches wherever they run: our hooks on their modules with them, and inputs that are no leaves."""
    model, x = Net(Chosen()), torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = exporter.export(model, (x,))
        step = EagerStep.run(Case(model, (x,)))
    assert "pythonop.unchecked" not in program.model.metadata_props
    assert step.gradients["parameter gradient", "inner.one.weight"] is not None
