"""The fresh process of verify, started in full: which pythonop it runs, and where it looks for what a file names."""

from __future__ import annotations

import importlib
import json
import os
import sys

import pytest
import torch

import exporter

HALVING = """
import json, sys
import torch

with open("paths.jsonl", "a") as file:
    file.write(json.dumps([entry for entry in sys.path if isinstance(entry, str)]) + "\\n")


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, g):
        return g * 5


class Model(torch.nn.Module):
    def forward(self, x):
        return Halve.apply(x)
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model of the current directory, where packages are called as ours: a clone, beside which pythonop is installed."""
    for package in ("exporter", "symbolics"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError('the current directory has it')")
    (tmp_path / "halving.py").write_text(HALVING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.path.append(tmp_path)  # which Python passes over, and many write
    yield importlib.import_module("halving").Model()
    del sys.modules["halving"]


def test_it_runs_the_pythonop_that_called_it(model, tmp_path):
    report = exporter.verify(model, (torch.randn(2),), steps=1)
    assert report.ok
    assert report.functions == {"halving:Halve": 1}
    # Where exporter is, torch may be, too, and the user's packages: no place is lost, and none comes before its time.
    here, there = map(json.loads, (tmp_path / "paths.jsonl").read_text().splitlines())
    assert there == [entry or str(tmp_path) for entry in here]


RAISING = """
import os
import torch


class Licensed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if os.environ["LICENSED"] != str(os.getpid()):
            raise LookupError("no licence")
        return x / 2

    @staticmethod
    def backward(ctx, g):
        return g / 2


class Model(torch.nn.Module):
    def forward(self, x):
        return Licensed.apply(x)
"""


def test_a_forward_that_only_this_process_can_run(tmp_path, monkeypatch):
    """What raised is named with the line of the Function, and the way out with it."""
    (tmp_path / "licensed.py").write_text(RAISING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LICENSED", str(os.getpid()))
    try:
        with pytest.raises(exporter.RunError) as caught:
            exporter.verify(importlib.import_module("licensed").Model(), (torch.randn(2),), steps=1)
    finally:
        del sys.modules["licensed"]
    first, line, way_out = str(caught.value).splitlines()
    assert first == "in the fresh process: LookupError: no licence"
    assert line == '  at licensed.py:10, in forward: raise LookupError("no licence")'
    assert "way out: let it run in a process" in way_out and "setup='package.module:function'" in way_out
