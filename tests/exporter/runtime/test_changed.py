"""A Function that is another one than at the export: who opens the file is told, once, or refuses it."""

from __future__ import annotations

import contextlib
import json

import onnx
import pytest
import torch
from click.testing import CliRunner

import exporter
from exporter.cli import main
from exporter.commands.run_file import run_file
from exporter.files.trust import register, unregister
from symbolics.node.names import FUNCTIONS_KEY
from tests.support import Calls

HERE = f"{__name__}:Halved"


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 0.5

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


class Steeper(Halved):
    @staticmethod
    def backward(ctx, grad):
        return grad * 0.75


class Other(Steeper):
    @staticmethod
    def forward(ctx, x):
        return x * 0.25


@contextlib.contextmanager
def stands_for(cls):
    """In the place of Halved, as an edit of its module would put it there."""
    register(cls, HERE)
    try:
        yield
    finally:
        unregister(HERE)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("changed") / "model.onnx"
    exporter.export(Calls(lambda x: Halved.apply(x) + Halved.apply(x)), (torch.randn(3),)).save(path)
    return path


WAYS = {
    "load": exporter.load,
    "inference_session": exporter.inference_session,
    "reference_evaluator": exporter.reference_evaluator,
    "run": lambda path, allow=(), strict=False: run_file(path, allow=allow, strict=strict),
}


@pytest.mark.parametrize("way", WAYS)
def test_who_opens_the_file_is_told(way, path, recwarn):
    def said():
        return [str(recwarn.pop(exporter.PythonopWarning).message) for _ in range(len(recwarn)) if recwarn.list]

    WAYS[way](path, allow=[HERE], strict=True)
    recwarn.clear()
    with stands_for(Steeper):
        WAYS[way](path, allow=[HERE])
        with pytest.raises(exporter.RunError, match=f"the backward of {HERE} has changed since the file was exported"):
            WAYS[way](path, allow=[HERE], strict=True)
    found = [str(each.message) for each in recwarn if issubclass(each.category, exporter.PythonopWarning)]
    assert len(found) == 1 and found[0].startswith(f"the backward of {HERE} has changed") and "strict=True" in found[0]
    with stands_for(Other), pytest.warns(exporter.PythonopWarning, match=f"^the forward and the backward of {HERE} have changed"):
        WAYS[way](path, allow=[HERE])


def test_a_trainer(recwarn):
    step = exporter.export_training_step(
        torch.nn.Sequential(torch.nn.Linear(3, 3), Calls(Halved.apply)), (torch.randn(2, 3),), loss=torch.nn.functional.mse_loss,
        targets=(torch.randn(2, 3),), optimizer="sgd",
    )  # fmt: skip
    exporter.Trainer(step, allow=[HERE], strict=True)
    with stands_for(Steeper):
        with pytest.raises(exporter.RunError, match="the backward of"):
            exporter.Trainer(step, allow=[HERE], strict=True)


def test_files_that_say_nothing_are_opened_without_a_word(path, recwarn):
    proto = onnx.load(path)
    kept = [entry for entry in proto.metadata_props if entry.key != FUNCTIONS_KEY]
    assert len(kept) == len(proto.metadata_props) - 1, "two calls of one Function are one entry"
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    with stands_for(Other):
        exporter.load(proto, allow=[HERE], strict=True)
    assert not [each for each in recwarn if issubclass(each.category, exporter.PythonopWarning)]


def test_a_name_that_no_node_has_is_not_looked_for(path):
    proto = onnx.load(path)
    for entry in proto.metadata_props:
        if entry.key == FUNCTIONS_KEY:
            entry.value = json.dumps({"this_module.is_not:There": {"forward": "source-1:0", "backward": "source-1:0"}})
    exporter.load(proto, allow=[HERE, "this_module.*"], strict=True)


def test_commands_show_and_refuse(path, tmp_path):
    run = CliRunner()
    shown = json.loads(run.invoke(main, ["inspect", str(path), "--json"]).stdout)["functions"]
    assert set(shown) == {HERE} and shown[HERE]["backward"].startswith("source-1:")
    assert shown[HERE]["backward"].partition(":")[2][:12] in run.invoke(main, ["inspect", str(path)]).stdout
    with stands_for(Steeper):
        assert run.invoke(main, ["run", str(path), "--allow", HERE]).exit_code == 0
        refused = run.invoke(main, ["run", str(path), "--allow", HERE, "--strict"])
        assert refused.exit_code == 2 and "has changed since" in refused.stderr
    proto = onnx.load(path)
    for entry in proto.metadata_props:
        entry.value = entry.value.replace(shown[HERE]["backward"], "source-1:0")
    onnx.save(proto, tmp_path / "other.onnx")
    found = json.loads(run.invoke(main, ["diff", str(path), str(tmp_path / "other.onnx"), "--json"]).stdout)
    assert [change["what"] for change in found["calls"]] == [f"the backward of {HERE}"] and not found["metadata"]
