"""pythonop gradient and pythonop run, and inspect on a training file."""

from __future__ import annotations

import json
import os

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner, Result

import exporter
from exporter.cli import main
from symbolics.node.metadata import read_pairing, read_tangents
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


@pytest.mark.parametrize("command", ["gradient", "tangent"])
def test_a_file_without_a_float_output_has_nothing_to_start_from(command, tmp_path):
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[2,3] x) => (int64[2,1] y) <float[3] w = {1, 2, 3}> { m = Mul(x, w) y = ArgMax<axis = 1>(m) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    result = cli(command, tmp_path / "model.onnx", "-o", tmp_path / "out.onnx")
    assert result.exit_code == 2 and not result.stdout
    assert f"no output of the model is a float tensor, so nothing has a {command}: 'y' is of type INT64" in result.stderr
    assert "way out" in result.stderr and not (tmp_path / "out.onnx").exists()


def test_tangent(file, tmp_path):
    result = cli("tangent", file, "-o", tmp_path / "tangent.onnx", "--wrt", "x", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    written = onnx.load(tmp_path / "tangent.onnx")
    onnx.checker.check_model(written, full_check=True)
    pairing = read_tangents({p.key: p.value for p in written.metadata_props})
    assert (
        (facts["inputs"], facts["outputs"]) == (pairing.inputs, pairing.outputs) == ({"x": "x_tangent"}, {"linear_1": "linear_1_tangent"})
    )
    assert facts["nodes"] > facts["forward_nodes"] == 4
    (row,) = json.loads(cli("inspect", tmp_path / "tangent.onnx", "--json").stdout)["rows"]
    assert row["kind"] == "PythonOpTangent"
    shown = cli("inspect", tmp_path / "tangent.onnx").stdout
    assert "0 PythonOp, 0 PythonOpGrad, 1 PythonOpTangent, tangents paired" in " ".join(shown.split())
    text = cli("tangent", file, "-o", tmp_path / "tangent.onnx", "--of", "linear_1").stdout
    assert "takes weight_tangent" in text and "gives 1 tangent" in text.splitlines()


@pytest.mark.parametrize(("arguments", "message"), [(["--wrt", "nobody"], "nobody"), (["--of", "nobody"], "nobody")])
def test_tangent_of_nothing(file, tmp_path, arguments, message):
    result = cli("tangent", file, "-o", tmp_path / "tangent.onnx", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "tangent.onnx").exists()


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


# --------------------------------------------------------------------------------------- an output that is something else


@pytest.mark.parametrize("command", ["gradient", "run"])
@pytest.mark.parametrize("kind", ["itself", "another spelling", "hard link", "symbolic link", "its data", "data of an older output"])
def test_an_output_that_is_the_input(file, tmp_path, monkeypatch, command, kind):
    """Refused before anything is built or run; both files stay."""
    made = onnx.load(file)
    data = "training.onnx.0123456789abcdef.data"  # what `mv training.onnx model.onnx` leaves
    onnx.save_model(made, file, save_as_external_data=True, location=data, size_threshold=0)
    output = {
        "itself": file,
        "another spelling": tmp_path / "sub" / ".." / file.name,
        "hard link": tmp_path / "hard.onnx",
        "symbolic link": tmp_path / "soft.onnx",
        "its data": tmp_path / data,
        "data of an older output": tmp_path / "training.onnx",
    }[kind]
    (tmp_path / "sub").mkdir()
    (tmp_path / "hard.onnx").hardlink_to(file)
    (tmp_path / "soft.onnx").symlink_to(file)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    monkeypatch.setattr(exporter, "build_gradient_graph", pytest.fail)
    monkeypatch.setattr("exporter.commands.run.run_feeds", pytest.fail)
    result = cli(command, file, "-o", output)
    assert result.exit_code == 2
    assert "choose another output" in result.stderr, (result.output, result.exception)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.*")} == before


@pytest.mark.parametrize("command", [("profile",), ("verify", "tests.exporter.commands.test_cli_files:target")], ids=["profile", "verify"])
def test_a_report_that_is_the_models_data(file, tmp_path, command):
    """A stranger's model may name its data as a report is named."""
    made = onnx.load(file)
    onnx.save_model(made, file, save_as_external_data=True, location="report.html", size_threshold=0)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    result = cli(command[0], file, *command[1:], "--html", tmp_path / "report.html")
    assert result.exit_code == 2
    assert "report.html, which is needed" in result.stderr, result.output
    assert {path: path.read_bytes() for path in tmp_path.glob("*.*")} == before


@pytest.mark.parametrize("name", ["training.onnx", "eval.onnx", "initial.onnx", "manifest.json"])
def test_a_trained_model_in_the_place_of_its_training(tmp_path, name):
    folder = tmp_path / "artifacts"
    folder.mkdir()
    for each in ("training.onnx", "eval.onnx", "initial.onnx", "manifest.json", "after.state"):
        (folder / each).write_bytes(b"as it was")
    result = cli("trained", folder, folder / "after.state", "-o", folder / name)
    assert result.exit_code == 2
    assert f"{name}, which is needed" in result.stderr, result.output
    assert (folder / name).read_bytes() == b"as it was"


@pytest.mark.parametrize("options", [(), ("--traceback",)], ids=["plain", "traceback"])
def test_a_files_names_do_not_steer_the_terminal(tmp_path, options):
    made = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 20]> m (float[N] x) => (float[N] y) { y = Abs(x) }')
    made.graph.node[0].op_type = "Foo\x1b]0;OWNED\x07\x1b[31m"
    onnx.save(made, tmp_path / "m.onnx")
    result = cli(*options, "run", tmp_path / "m.onnx")
    assert result.exit_code == 2 and "Foo" in result.stderr
    assert "\x1b" not in result.stdout + result.stderr and "\x07" not in result.stdout + result.stderr


def test_what_a_users_code_says_does_not_steer_the_terminal():
    result = cli("--traceback", "export", "tests.exporter.commands.cli_targets:raises", "-o", "m.onnx")
    assert result.exit_code == 2 and "Traceback" in result.stderr
    assert result.stderr.count("RuntimeError: no model today\\x1b[31m") == 2, (
        result.stderr
    )  # in the traceback, and in our own line; click would take raw ones out


def test_an_output_that_is_the_inputs_of_the_run(file, tmp_path):
    np.savez(tmp_path / "in.npz", x=np.zeros((2, 4), np.float32))
    before = (tmp_path / "in.npz").read_bytes()
    result = cli("run", file, "--allow", "tests.*", "--inputs", tmp_path / "in.npz", "-o", tmp_path / "in.npz")
    assert result.exit_code == 2
    assert "in.npz, which is needed" in result.stderr
    assert (tmp_path / "in.npz").read_bytes() == before


def test_two_outputs_in_one_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = "tests.exporter.commands.test_cli_files:target"
    assert "choose another" in cli("export", target, "-o", "m.onnx", "--gradients", tmp_path / "m.onnx").stderr
    (tmp_path / "step.init.onnx").symlink_to("step.onnx")
    assert "step.init.onnx: this would replace" in cli("step", target, "-o", "step.onnx").stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step.init.onnx"]


@pytest.mark.parametrize("command", ["export", "export --gradients", "step", "step's start", "verify", "gradient", "run"])
def test_a_device_stays_one(file, tmp_path, command):
    """Refused before TARGET is imported."""
    pipe, target = tmp_path / "step.init.onnx", "tests.exporter.commands.cli_targets:raises"
    os.mkfifo(pipe)
    arguments = {
        "export": ["export", target, "-o", pipe],
        "export --gradients": ["export", target, "-o", tmp_path / "m.onnx", "--gradients", pipe],
        "step": ["step", target, "-o", pipe],
        "step's start": ["step", target, "-o", tmp_path / "step.onnx"],
        "verify": ["verify", target, "--html", pipe],
        "gradient": ["gradient", file, "-o", pipe],
        "run": ["run", file, "-o", pipe],
    }[command]
    result = cli(*arguments)
    assert result.exit_code == 2
    assert f"cannot write {pipe}: it is a device, pipe or socket" in result.stderr.replace("\n", "")
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name, pipe.name]


@pytest.mark.parametrize(
    ("command", "said"), [(None, "another exporter's model\n"), ("gradient", "with gradients of pythonop"), ("tangent", "with tangents of")]
)
def test_inspect_says_what_of_a_foreign_model_is_of_pythonop(tmp_path, command, said):
    torch.onnx.export(torch.nn.Linear(3, 2), (torch.randn(1, 3),), tmp_path / "foreign.onnx", dynamo=False)
    file = tmp_path / "foreign.onnx"
    if command is not None:
        assert cli(command, file, "-o", tmp_path / "made.onnx").exit_code == 0
        file = tmp_path / "made.onnx"
    line = next(line for line in cli("inspect", file).stdout.splitlines() if line.startswith("format"))
    assert said in f"{line.strip()}\n" and "another exporter's model" in line
