"""``fallback=True`` in few seconds: a way out is taken, what works is left alone, and what an error says of the ways."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch import nn

import exporter
from exporter.errors import ExportError, PythonopWarning
from exporter.fallback import search
from exporter.forward import hook as hooks
from tests.exporter.fallback.nets import Net, NoDerivative, Remembers, Solve, state, taken


def test_what_works_is_left_alone(x):
    model = Net(nn.ReLU())
    with warnings.catch_warnings():
        warnings.simplefilter("error", PythonopWarning)
        program = exporter.export(model, (x,), fallback=True, dynamo=False)
    assert program.fallback == ""
    assert not program.opaque


def test_an_interrupt_leaves_nothing_behind(x, monkeypatch, tmp_path):
    def interrupted(self, way):
        raise KeyboardInterrupt

    monkeypatch.setattr(search.Search, "_exported", interrupted)
    model = Net(Remembers()).eval()
    before = state(model)
    with pytest.raises(KeyboardInterrupt), exporter.hook(fallback=True):
        torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=False)
    assert state(model)[1:] == before[1:]
    assert not os.listdir(tmp_path)
    assert hooks._open_hooks == 0
    assert getattr(hooks._thread, "hook", None) is None


def test_what_fails_in_eager_mode(x):
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("no such thing")

    with pytest.raises(ExportError, match="no such thing"):
        exporter.export(Fails(), (x,), fallback=True, dynamo=False)


def test_an_operator_without_a_derivative(x):
    """The outputs are compared alone."""
    program = taken(Net(NoDerivative()), x, dynamo=False)
    assert program.fallback == 'opaque="missing"'


def test_the_error_lists_the_ways_that_were_tried(x):
    with pytest.raises(ExportError) as caught:
        exporter.export(Net(Solve()), (x,), dynamo=False)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 10
    assert "linalg_solve, called in module parts.0" in lines[0]
    assert "nets.py:" in lines[1]
    assert any('opaque="missing" works: outputs and gradients equal eager' in line for line in lines)
    assert lines[-1].strip() == "fallback=True takes the first that works"


def test_a_large_model_is_not_tried(x, monkeypatch):
    from exporter.forward import ways_out

    monkeypatch.setattr(ways_out, "_MOST_BYTES", 10)
    with pytest.raises(ExportError, match='way out: opaque=.*or opaque="missing"') as caught:
        exporter.export(Net(Solve()), (x,), dynamo=False)
    assert "tried" not in str(caught.value)
