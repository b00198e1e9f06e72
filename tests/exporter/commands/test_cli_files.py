"""pythonop gradient and pythonop run, and inspect on a training file."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner, Result

import exporter
from exporter.cli import main
from symbolics.node.metadata import read_pairing
from tests.symbolics.capture.functions import Mlp


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def model() -> Mlp:
    torch.manual_seed(1)
    return Mlp()


@pytest.fixture
def file(model, tmp_path):
    exporter.export(model, (torch.randn(2, 4),), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=2)}}).save(tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_gradient(file, tmp_path):
    result = cli("gradient", file, "-o", tmp_path / "training.onnx", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    training = onnx.load(tmp_path / "training.onnx")
    onnx.checker.check_model(training, full_check=True)
    pairing = read_pairing({p.key: p.value for p in training.metadata_props})
    assert facts["outputs"] == dict(pairing.outputs)
    assert facts["inputs"] == dict(pairing.inputs)
    assert facts["nodes"] == len(training.graph.node) > facts["forward_nodes"] == 4
    row = json.loads(cli("inspect", tmp_path / "training.onnx", "--json").stdout)["rows"][0]
    (backward,) = row["backward"]
    assert backward.endswith(": linear, weight")


def test_gradient_of_some(file, tmp_path):
    result = cli("gradient", file, "-o", tmp_path / "training.onnx", "--wrt", "weight", "--wrt", "x", "--of", "linear_1", "--json")
    assert list(json.loads(result.stdout)["outputs"]) == ["weight", "x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wrt", "nobody"], "nobody"),
        (["--of", "nobody"], "nobody"),
    ],
)
def test_gradient_of_nothing(file, tmp_path, arguments, message):
    result = cli("gradient", file, "-o", tmp_path / "training.onnx", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "training.onnx").exists()


def test_export_with_gradients(tmp_path):
    result = cli(
        "export", "tests.exporter.commands.test_cli_files:target", "-o", tmp_path / "m.onnx", "--gradients", tmp_path / "t.onnx", "--json"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["gradients"] == str(tmp_path / "t.onnx")
    assert [n.op_type for n in onnx.load(tmp_path / "t.onnx").graph.node].count("PythonOpGrad") == 1


def target():
    return Mlp(), (torch.randn(2, 4),)


@pytest.mark.parametrize("engine", ["--reference", None], ids=["reference", "onnxruntime"])
def test_run(model, file, tmp_path, engine):
    x = torch.randn(3, 4)
    np.savez(tmp_path / "in.npz", x=x.numpy())
    options = [engine] if engine else []
    result = cli(
        "run",
        file,
        "--allow",
        "tests.symbolics.capture.functions:*",
        "--inputs",
        tmp_path / "in.npz",
        "-o",
        tmp_path / "out.npz",
        "--json",
        *options,
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["outputs"][0]["shape"] == [3, 3]
    with np.load(tmp_path / "out.npz") as outputs:
        np.testing.assert_allclose(outputs["linear_1"], model(x).detach().numpy(), rtol=1e-5, atol=1e-6)
    assert "linear_1" in cli("run", file, "--allow", "tests.*", "--dim", "batch=5", *options).stdout


def test_run_refuses(file, tmp_path):
    refused = cli("run", file)
    assert refused.exit_code == 2
    assert "allow=" in refused.stderr
    (tmp_path / "bad.npz").write_bytes(b"no")
    assert cli("run", file, "--allow", "tests.*", "--inputs", tmp_path / "bad.npz").exit_code == 2
    np.savez(tmp_path / "wrong.npz", x=np.zeros((2, 5), np.float32))
    wrong = cli("run", file, "--allow", "tests.*", "--inputs", tmp_path / "wrong.npz", "-o", tmp_path / "out.npz")
    assert wrong.exit_code == 2
    assert not (tmp_path / "out.npz").exists()
    (tmp_path / "broken.onnx").write_bytes(file.read_bytes()[:100])
    for command in (
        ["run", tmp_path / "broken.onnx"],
        ["gradient", tmp_path / "broken.onnx", "-o", tmp_path / "t.onnx"],
        ["run", tmp_path / "missing.onnx"],
    ):
        assert cli(*command).exit_code == 2
