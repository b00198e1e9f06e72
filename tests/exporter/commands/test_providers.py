"""--provider."""

from __future__ import annotations

import json
import sys

import pytest

from exporter.commands.providers import provider_of
from tests.exporter.commands.test_cli import TARGETS, fails


def test_names_and_options():
    assert [provider_of(text) for text in ("cpu", "openvino,precision=bfloat16,device=gpu")] == [
        "cpu", ("openvino", {"precision": "bfloat16", "device": "gpu"})
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["run", "profile"])
def test_commands_that_run_a_file(run, samples, command):
    result = run(command, samples["plain"], "--provider", "cpu", "--json")
    assert result.exit_code == 0, result.output
    fails(run(command, samples["plain"], "--provider", "rocket"), "there is no execution provider rocket: here are")
    fails(run(command, samples["plain"], "--provider", "cpu,fast"), "is not NAME or NAME,OPTION=VALUE")


@pytest.mark.parametrize("command", ["run", "profile"])
def test_what_is_not_here_has_nothing_to_do_with_sizes(run, samples, command, monkeypatch):
    """An open axis of no size was named beside a package that is not installed."""
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_openvino", None)
    result = run(command, samples["op"], "--allow", f"{TARGETS}:*", "--provider", "openvino")
    fails(result, "the execution provider openvino needs a package: pip install onnxruntime-ep-openvino")
    assert "--dim" not in result.stderr and len(result.stderr.splitlines()) == 1


def test_verify(run, quick_verify):
    result = run("verify", f"{TARGETS}:case", "--provider", "cpu", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["facts"]["execution providers"] == "cpu"


def test_the_reference_has_none(run, samples):
    fails(
        run("run", samples["plain"], "--reference", "--provider", "cpu"),
        "--reference runs on onnx.reference, which has no execution providers",
    )


def test_doctor_says_which_provider_runs_what(run, samples):
    result = run("doctor", samples["op"], "--provider", "cpu", "--json")
    assert result.exit_code == 0, result.output
    placed = json.loads(result.stdout)["placements"]
    assert list(placed) == ["CPUExecutionProvider"]
    assert placed["CPUExecutionProvider"]["PythonOp"] == 2
    assert "CPUExecutionProvider runs" in run("doctor", samples["op"], "--provider", "cpu").output
    fails(run("doctor", "--provider", "cpu"), "are about a FILE")


def test_step_says_which_provider_runs_what(run, path):
    result = run("step", f"{TARGETS}:trainable", "-o", path, "--provider", "cpu", "--json")
    assert result.exit_code == 0, result.output
    assert sum(json.loads(result.stdout)["placements"]["CPUExecutionProvider"].values()) > 10
