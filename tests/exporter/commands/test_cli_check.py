"""Before a command says "wrote", onnx.checker has passed the model, and onnxruntime has opened it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from exporter import Case
from tests.exporter.commands.test_cli import fails

pytestmark = [pytest.mark.unusable(reason="onnxruntime has no kernels of bfloat16 on the CPU"), pytest.mark.filterwarnings("ignore")]
HALF = f"{__name__}:half"


def half():
    """What is valid ONNX, and what onnxruntime has no kernel of."""
    x, y = torch.randn(4, 3).bfloat16(), torch.randn(4, 2).bfloat16()
    return Case(nn.Linear(3, 2).bfloat16(), (x,), targets=(y,), loss=nn.functional.mse_loss)


def test_export(run, path, dynamo):
    way = "--dynamo" if dynamo else "--no-dynamo"
    path.write_bytes(b"before")
    fails(run("export", HALF, "-o", path, "--gradients", path.with_name("g.onnx"), way), "is not written", "node: Gemm", "--no-check")
    assert path.read_bytes() == b"before" and len(list(path.parent.iterdir())) == 1


def test_by_choice_it_is_written_and_said(run, path):
    result = run("export", HALF, "-o", path, "--no-check", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["unchecked"] == ["not checked, as asked: neither by onnx.checker nor by onnxruntime"]
    for command in ("gradient", "tangent"):
        built = path.with_name(f"{command}.onnx")
        fails(run(command, path, "-o", built), "is not written", "--no-check")
        assert not built.exists()
        result = run(command, path, "-o", built, "--no-check")
        assert result.exit_code == 0 and "not checked, as asked" in result.stdout and built.exists()


def test_step_and_artifacts(run, path):
    folder = path.with_name("artifacts")
    fails(run("step", HALF, "-o", path, "--artifacts", folder), "is not written", "--no-check")
    assert not list(path.parent.iterdir())
    assert run("step", HALF, "-o", path, "--artifacts", folder, "--no-check").exit_code == 0
    assert len(list(path.parent.iterdir())) == 3


def test_what_was_not_opened_is_said(run, path, monkeypatch):
    monkeypatch.setattr("exporter.runtime.usable._MOST", 1)
    result = run("export", "tests.exporter.commands.cli_targets:pair", "-o", path)
    assert result.exit_code == 0, result.output
    assert "passes onnx.checker, and was not opened in onnxruntime: it has" in result.stdout


def test_a_model_that_fails_in_eager_is_no_file(run, path, dynamo):
    way = "--dynamo" if dynamo else "--no-dynamo"
    result = run("export", "tests.exporter.commands.cli_targets:pair", "-o", path, "--input", "x=float64[8,3]", way)
    fails(result, "fails in eager mode on its own example", "at cli_targets.py:")
    assert not path.exists()
