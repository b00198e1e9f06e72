"""pythonop doctor: what it tries, and that it says what fails."""

from __future__ import annotations

import json

import onnxruntime
import torch
from click.testing import CliRunner

from exporter.cli import main
from exporter.verification import trials


def doctor(*arguments):
    return CliRunner().invoke(main, ["doctor", *arguments])


def test_everything_works_here():
    result = doctor("--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert len(result.stdout.splitlines()) == 1, "a program reads one line"
    assert facts["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert facts["versions"]["onnxruntime"] == onnxruntime.__version__
    assert {each["word"] for each in facts["findings"]} == {"works"}
    assert [each["what"] for each in facts["findings"]] == [*trials.TRIALS, "pictures"]
    assert result.stderr == ""


def test_what_fails_is_said(monkeypatch):
    def forward(ctx, x):
        return x * 3

    monkeypatch.setattr(trials.Probe, "forward", staticmethod(forward))
    monkeypatch.setitem(trials.TRIALS, "page of verify", absent)
    result = doctor("--json")
    assert result.exit_code == 1
    found = {each["what"]: each for each in json.loads(result.stdout)["findings"]}
    assert found["onnxruntime"]["word"] == found["onnx.reference"]["word"] == "fails"
    assert "not eager's" in found["onnxruntime"]["text"]
    assert found["export, dynamo"]["word"] == "works"
    assert found["page of verify"] == {"what": "page of verify", "word": "not there", "text": "pip install it"}
    assert "not eager's" in doctor().output.replace("\n", "")
    monkeypatch.undo()
    assert doctor().exit_code == 0, "what an earlier doctor exported is looked at again"


def test_pictures_are_optional(monkeypatch):
    monkeypatch.setattr("exporter.commands.doctor.missing", lambda: "pip install 'pythonop[draw]'")
    result = doctor("--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["findings"][-1] == {"what": "pictures", "word": "not there", "text": "pip install 'pythonop[draw]'"}


def absent():
    raise trials.NotThere("pip install it")
