"""No command writes over a file that it reads: a model, its data file, arrays, a state, a folder of artifacts."""

from __future__ import annotations

import importlib
from pathlib import Path

import click
import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import parser

import exporter
from exporter.cli import COMMANDS, main
from exporter.files.trained import files_of
from exporter.training.artifacts import export_evaluation, write_artifacts

#: command -> its options that name a file or folder to write.
_WRITES = {
    "draw": ["--output"],
    "export": ["--output", "--gradients"],
    "gradient": ["--output"],
    "profile": ["--html"],
    "quantize": ["--output"],
    "run": ["--output"],
    "step": ["--output", "--artifacts"],
    "tangent": ["--output"],
    "trained": ["--output"],
    "verify": ["--html"],
}
#: What a command has beside the model that it reads and the output.
_CASES = {
    "draw": [],
    "gradient": [],
    "profile": [],
    "quantize": [],
    "run": [],
    "tangent": [],
    "verify": ["tests.exporter.verification.targets:good"],
}
_READ = {"--arrays", "--inputs", "--quantized", "--input"}


def test_every_command_that_writes_is_here():
    found = {}
    for name in COMMANDS:
        command = getattr(importlib.import_module(f"exporter.commands.{name}"), name)
        options = [each for each in command.params if isinstance(each, click.Option) and isinstance(each.type, click.Path)]
        names = [max(each.opts, key=len) for each in options]
        found[name] = [option for option in names if option not in _READ]
    assert {name: options for name, options in found.items() if options} == _WRITES
    assert set(_WRITES) == {*_CASES, "export", "step", "trained"}


def _refused(*arguments: object) -> None:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    assert "this would replace or remove" in result.stderr


@pytest.fixture
def model(tmp_path) -> Path:
    """A model whose weight is in the file w.svg."""
    proto = parser.parse_model('<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { y = Mul(x, w) }')
    weight = proto.graph.initializer.add(name="w", data_type=1, dims=[2], data_location=onnx.TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="w.svg")
    (tmp_path / "w.svg").write_bytes(np.ones(2, np.float32).tobytes())
    onnx.save(proto, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.mark.parametrize("name", _CASES)
@pytest.mark.parametrize("over", ["model.onnx", "w.svg", "link.svg"])
def test_over_the_model_or_its_data(name, over, model):
    (model.parent / "link.svg").symlink_to("w.svg")
    before = {path.name: path.read_bytes() for path in model.parent.iterdir()}
    _refused(name, model, *_CASES[name], _WRITES[name][0], model.parent / over)
    assert {path.name: path.read_bytes() for path in model.parent.iterdir()} == before


@pytest.mark.parametrize("name", ["profile", "quantize", "run"])
def test_over_the_arrays(name, model):
    np.savez(model.parent / "inputs.npz", x=np.ones(2, np.float32))
    _refused(name, model, "--inputs", model.parent / "inputs.npz", _WRITES[name][0], model.parent / "inputs.npz")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Artifacts whose tensors are in data files, and a state."""
    path = tmp_path_factory.mktemp("artifacts")
    net, x, loss = torch.nn.Linear(32, 32), torch.randn(4, 32), torch.nn.functional.mse_loss
    step = exporter.export_training_step(net, (x,), loss=loss, targets=(torch.randn(4, 32),), optimizer="sgd", hyperparameters={"lr": 0.1})
    write_artifacts(step, export_evaluation(net, (x,)), path, external_data=True)
    (path / "a.state").write_bytes(exporter.Trainer.load(path).save())
    return path


def test_trained_over_its_folder(folder):
    here = sorted(path for path in folder.iterdir() if path.is_file())
    assert {"training.onnx", "eval.onnx", "initial.onnx", "manifest.json", "a.state"} <= {path.name for path in here}
    assert any(path not in (*files_of(folder), folder / "a.state") for path in here)  # data files
    before = [path.read_bytes() for path in here]
    for path in here:
        _refused("trained", folder, folder / "a.state", "-o", path)
    assert [path.read_bytes() for path in here] == before
    result = CliRunner().invoke(main, ["trained", str(folder), str(folder / "a.state"), "-o", str(folder / "model.onnx")])
    assert result.exit_code == 0, result.output
