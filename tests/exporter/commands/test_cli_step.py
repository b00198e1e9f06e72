"""pythonop step."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import exporter
from exporter.cli import main
from exporter.runtime.provider_forms import FORMS
from symbolics.node.metadata import read_step

TARGET = "tests.exporter.commands.cli_targets:trainable"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def _run(*arguments):
    return CliRunner().invoke(main, ["step", *map(str, arguments)])


def test_writes_a_step_and_its_start(tmp_path):
    path = tmp_path / "step.onnx"
    result = _run(TARGET, "-o", path, "--optimizer", "sgd", "--set", "lr=0.5", "--set", "momentum=0.9", "--clip-norm", 1, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    facts = json.loads(result.stdout)
    assert (facts["inputs"], facts["targets"], facts["untrained"]) == (["input"], ["target"], [])
    step, start = exporter.inference_session(path), exporter.inference_session(facts["initial"])
    state = dict(zip([o.name for o in start.get_outputs()], start.run(None, {}), strict=True))
    assert float(state["learning_rate"]) == 0.5
    names = [o.name for o in step.get_outputs()]
    assert names[:2] == ["loss", "gradient_norm"]
    losses = []
    for size in (4, 7, 4, 4):
        batch = {"input": np.ones((size, 3), np.float32), "target": np.ones(size, np.int64)}
        results = dict(zip(names, step.run(None, {**state, **batch}), strict=True))
        state.update({name: results[f"{name}.next"] for name in state if f"{name}.next" in results})
        losses.append(float(results["loss"]))
    assert losses[-1] < losses[0]
    metadata = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert read_step(metadata).hyperparameters[0]["momentum"] == 0.9


def test_names_of_outputs_and_open_axes_of_targets(tmp_path):
    more = ("--output-name", "logits", "--optimizer", "nadam", "--ema", 0.9, "--clip-value", 0.1)
    axes = ("--dynamic", "input:0=batch", "--dynamic", "target:0=batch")
    result = _run(TARGET, "--artifacts", tmp_path / "made", *axes, *more, "--no-dynamo")
    assert result.exit_code == 0, (result.output, result.exception)
    manifest = json.loads((tmp_path / "made" / "manifest.json").read_text())
    assert [entry["shape"][0] for entry in manifest["inputs"] + manifest["targets"]] == ["batch", "batch"]
    assert [entry["name"] for entry in manifest["eval"]["outputs"]] == ["logits"]
    assert [output.name for output in onnx.load(tmp_path / "made" / "training.onnx").graph.output][:2] == ["loss", "logits"]
    trainer = exporter.Trainer.load(tmp_path / "made")
    assert trainer.step({"input": np.ones((7, 3), np.float32), "target": np.ones(7, np.int64)}) > 0


def test_recomputes_by_choice(tmp_path):
    counts = []
    for more in ([], ["--recompute", "auto"], ["--recompute", "1000000"]):
        result = _run("tests.exporter.commands.cli_targets:trainable_chain", "-o", tmp_path / "step.onnx", "--json", *more)
        assert result.exit_code == 0, (result.output, result.exception)
        counts.append(json.loads(result.stdout)["nodes"])
    assert counts[1] > counts[0] == counts[2]  # all fits in a million bytes


def test_files_for_a_provider(tmp_path):
    """Both the step and the artifacts; written twice it is the same."""
    result = _run(TARGET, "-o", tmp_path / "step.onnx", "--artifacts", tmp_path, "--for", "webgpu", "--no-dynamo")
    assert result.exit_code == 0, (result.output, result.exception)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["targets"][0]["dtype"] == "int32"
    assert {entry["dtype"] for entry in manifest["state"]} == {"float32", "int32"}
    assert "LogSoftmax" not in {node.op_type for node in onnx.load(tmp_path / "training.onnx").graph.node}
    assert (tmp_path / "step.onnx").read_bytes() == (tmp_path / "training.onnx").read_bytes()
    assert (tmp_path / "step.init.onnx").read_bytes() == (tmp_path / "initial.onnx").read_bytes()
    plain = _run(TARGET, "-o", tmp_path / "plain.onnx", "--no-dynamo", "--json")
    batch = {"input": np.ones((4, 3), np.float32), "target": np.ones(4, np.int64)}
    losses = [exporter.Trainer.load(path).step(given) for path, given in
              ((json.loads(plain.stdout)["file"], batch), (tmp_path, {**batch, "target": np.ones(4, np.int32)}))]  # fmt: skip
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_providers_that_files_are_written_for():
    option = next(each for each in main.get_command(None, "step").params if each.name == "written_for")
    assert set(option.type.choices) == set(FORMS)


def test_says_what_it_wrote(tmp_path):
    result = _run(TARGET, "-o", tmp_path / "step.onnx", "--precision", "float16", "--accumulate", 2, "--no-dynamo")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "step.init.onnx" in result.stdout
    assert "X.next" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--set", "lr"], "NAME=NUMBER"),
        (["--set", "lr=quick"], "NAME=NUMBER"),
        (["--set", "rate=1"], "no hyperparameter 'rate'"),
        (["--optimizer", "adamax"], "adamax"),
        (["--clip-value", "-1"], "clip_value is -1.0"),
        (["--ema", "1"], "ema is 1.0"),
        (["--output-name", "loss"], "output_names has 'loss'"),
        (["--dynamic", "target_1:0=batch"], "there is no input target_1: its inputs are input, target"),
        (["--accumulate", "0"], "--accumulate"),
        (["--recompute", "-1"], "neither auto nor a number of bytes"),
        (["--recompute", "all"], "neither auto nor a number of bytes"),
        (["--clip-norm", "-1"], "clip_norm is -1.0"),
    ],
)
def test_bad_options_leave_nothing(arguments, text, tmp_path):
    result = _run(TARGET, "-o", tmp_path / "step.onnx", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_target_without_a_loss(tmp_path):
    result = _run("tests.exporter.commands.cli_targets:pair", "-o", tmp_path / "step.onnx")
    assert result.exit_code == 2
    assert "loss=None" in result.stderr
    assert "exporter.Case(model, args, loss=..., targets=(...,))" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path):
    result = _run(TARGET, "-o", tmp_path / "no" / "step.onnx")
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr


def test_artifacts(tmp_path):
    result = _run(TARGET, "--artifacts", tmp_path / "made", "--set", "lr=0.5", "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    facts = json.loads(result.stdout)
    assert facts["file"] == str(tmp_path / "made" / "training.onnx")
    assert facts["initial"] == str(tmp_path / "made" / "initial.onnx")
    names = ["eval.onnx", "eval_loss.onnx", "initial.onnx", "manifest.json", "training.onnx"]
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == names
    assert sorted(facts["artifacts"]) == [str(tmp_path / "made" / name) for name in names]
    manifest = json.loads((tmp_path / "made" / "manifest.json").read_text())
    assert manifest["hyperparameters"][0]["default"] == 0.5
    assert manifest["eval"]["inputs"] == [{"name": "input", "dtype": "float32", "shape": ["batch", 3]}]


def test_artifacts_beside_a_step_in_the_same_folder(tmp_path):
    result = _run(TARGET, "-o", tmp_path / "step.onnx", "--artifacts", tmp_path, "--no-dynamo", "--portable")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "wrote training.onnx, eval.onnx, initial.onnx, manifest.json, eval_loss.onnx into" in result.stdout
    assert len(list(tmp_path.iterdir())) == 7
    assert (tmp_path / "step.onnx").read_bytes() == (tmp_path / "training.onnx").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "nothing to write: give a file for the step (-o)"),
        (["--artifacts", "{folder}/no/there"], "there is no folder"),
        (["--artifacts", "{folder}/file"], "it is not a folder"),
        (["-o", "{folder}/eval.onnx", "--artifacts", "{folder}"], "this would replace or remove"),
        (["--artifacts", "{folder}/new", "--clip-norm", "-1"], "clip_norm is -1.0"),
    ],
)
def test_artifacts_that_cannot_be_written(arguments, text, tmp_path):
    (tmp_path / "file").write_text("mine")
    result = _run(TARGET, *(argument.format(folder=tmp_path) for argument in arguments))
    assert result.exit_code == 2
    assert text in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_artifacts_that_need_python(tmp_path):
    result = _run("tests.exporter.commands.cli_targets:trainable_wide", "--artifacts", tmp_path / "made", "--no-dynamo")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "needs Python: the calls of tests.exporter.commands.cli_targets:Scale stay PythonOps" in " ".join(result.stderr.split())
    assert "--portable" in result.stderr
    assert json.loads((tmp_path / "made" / "manifest.json").read_text())["python"] == ["tests.exporter.commands.cli_targets:Scale"]


def test_artifacts_warn_once(tmp_path, dynamo):
    """The step and the evaluation are two exports of one model, which warn of the same."""
    arguments = ("--artifacts", tmp_path / "made", "--portable", "--dynamo" if dynamo else "--no-dynamo")
    result = _run("tests.exporter.commands.cli_targets:trainable_mixed", *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    warned = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert sum(":Branches in module model at" in line for line in warned) == 1, warned
    assert len(warned) == len(set(warned)) == 2, "of the call, and of the folder that needs Python"
