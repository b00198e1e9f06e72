"""pythonop step."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import exporter
from exporter.cli import main
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
        (["--optimizer", "rmsprop"], "rmsprop"),
        (["--accumulate", "0"], "--accumulate"),
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
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path):
    result = _run(TARGET, "-o", tmp_path / "no" / "step.onnx")
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr
