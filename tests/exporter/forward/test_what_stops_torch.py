"""Where torch.export gives up: the cause in a sentence, the line, and a way out that works."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest
import torch
from torch import nn

import exporter


class Part(nn.Module):
    """What no graph can say, of a module inside of a model."""

    def __init__(self, how):
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.tensor(2.0)), how

    def forward(self, x):
        return self.how(x * self.weight)


class Net(nn.Module):
    def __init__(self, how, part=None):
        super().__init__()
        self.linear, self.part = nn.Linear(4, 4), part or Part(how)

    def forward(self, x):
        return self.part(self.linear(x))


def branch(x):
    return x * 2 if x.sum() > 0 else x * 3


def as_often_as_the_largest(x):
    for _ in range(int(x.abs().max().item()) + 1):
        x = x * 2
    return x


def until_equal(x):
    return x if torch.allclose(x, x * 1.5) else x * 3


def in_numpy(x):
    return x * torch.from_numpy(np.frombuffer(memoryview(x.detach().numpy()), np.float32).copy().reshape(x.shape))


def in_memory(x):
    y = x.detach().clone()
    ctypes.memset(y.data_ptr(), 0, 4)
    return x + y


VALUES = [branch, as_often_as_the_largest, until_equal]
MEMORY = [in_numpy, in_memory]


@pytest.mark.parametrize("how", VALUES + MEMORY, ids=lambda how: how.__name__)
def test_the_way_out_works(how):
    model, x = Net(how), torch.randn(3, 4)
    with pytest.raises(
        exporter.errors.ExportError, match="data-dependent Python" if how in VALUES else "reads the memory of a tensor"
    ) as caught:
        exporter.export(model, (x,))
    text = str(caught.value)
    assert "  at test_what_stops_torch.py:" in text
    assert len(text.splitlines()) <= 10
    assert "dynamo=False: no: the trace would keep what came of the example" in text
    (named,) = re.findall(r'opaque=\["(.+?)"\] works', text)
    module = exporter.load(exporter.export(model, (x,), opaque=[named]), allow=[named, how])
    other = torch.randn(3, 4) * 3
    for side in (model, module):
        side(other).square().sum().backward()
    torch.testing.assert_close(module(other), model(other))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-3)


def test_of_the_model_itself_the_whole_is_named():
    with pytest.raises(exporter.errors.ExportError, match=r"opaque=\[model\] works"):
        exporter.export(Part(branch), (torch.randn(3),))


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.view_as_real(torch.fft.rfft(x)).square().sum(-1)


def test_of_complex_operators_the_module_around_them_is_named():
    """No node takes complex tensors: to name the operator would lead nowhere."""
    model, x = Net(None, Spectrum()), torch.randn(3, 4)
    with pytest.raises(exporter.errors.ExportError, match="cannot translate it to ONNX") as caught:
        exporter.export(model, (x,), dynamo=False)
    text = str(caught.value)
    assert 'opaque="missing": no: ' in text
    assert "dynamo=True works: outputs and gradients equal eager's" in text
    assert len(text.splitlines()) <= 10
    named = f"{__name__}:Spectrum"
    module = exporter.load(exporter.export(model, (x,), dynamo=False, opaque=[named]), allow=[named])
    torch.testing.assert_close(module(x), model(x))


class Rules(nn.Module):
    """Has methods that others call, and no forward."""

    def checked(self, x):
        return x if x.sum() > 0 else -x


class Checked(nn.Module):
    def __init__(self):
        super().__init__()
        self.rules = Rules()

    def forward(self, x):
        return self.rules.checked(x)


def test_a_module_is_named_by_whose_forward_the_way_went():
    with pytest.raises(exporter.errors.ExportError, match=r'opaque=\["\S+:Checked"\] works'):
        exporter.export(Net(None, Checked()), (torch.randn(3, 4),))


@pytest.mark.parametrize("axes", [{0: "rows"}, {0: torch.export.Dim("rows"), 1: "columns"}], ids=["name", "dim"])
def test_a_size_that_the_code_makes_a_number_of(axes):
    def steps(x):
        h = torch.zeros_like(x[0])
        for index in range(x.shape[0]):
            h = torch.tanh(h + x[index])
        return h

    with pytest.raises(exporter.errors.ExportError) as caught:
        exporter.export(Part(steps), (torch.randn(3, 4),), dynamic_shapes=(axes,))
    first, second, *_ = str(caught.value).splitlines()
    assert "makes a number of an open size" in first and re.search(r"(axis 0 of ('x'|argument 0)|the axis 'rows') is always 3$", first)
    assert "Loop over an open axis" in second
