"""Where every warning is an error, as in the tests of many libraries: torch's remarks about itself stop no export."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import exporter
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
