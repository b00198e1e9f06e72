"""--portable and --portable-only, and what pythonop inspect says of such files."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner

from exporter.cli import main

TARGETS = "tests.exporter.commands.cli_targets"
SCALE, BRANCHES = f"{TARGETS}:Scale", f"{TARGETS}:Branches"


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def operators(path):
    return {(node.domain, node.op_type) for node in onnx.load(path).graph.node}


def exported(*arguments):
    result = run("export", *arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


@pytest.mark.parametrize("order", ["before", "behind"])
def test_portable(path, order, dynamo):
    """The flag takes no value, so a TARGET may stand behind it."""
    target, flag = f"{TARGETS}:pair", ["--portable", "--dynamo" if dynamo else "--no-dynamo"]
    facts = exported(*([*flag, target] if order == "before" else [target, *flag]), "-o", path)
    assert facts["calls"] == 0
    assert [(call["function"], call["kind"], call["reason"]) for call in facts["portable"]] == [(SCALE, "function", "")] * 2
    assert all(call["source"].startswith(f"{TARGETS}:") for call in facts["portable"])
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])  # nothing of ours
    (value,) = session.get_inputs()
    assert np.isfinite(session.run(None, {value.name: np.ones((2, 3), np.float32)})[0]).all()


def test_lines_for_people(path):
    result = run("export", f"{TARGETS}:mixed", "-o", path, "--portable")
    assert result.exit_code == 0, result.output
    assert "calls that became ONNX functions: 1, that could not: 1" in result.stdout
    assert f"1 x {SCALE}" in result.stdout
    assert f"1 x {BRANCHES} stays a PythonOp: what it does depends on the values of a tensor" in result.stdout
    assert f"warning: {BRANCHES}" in result.stderr


def test_one_that_no_graph_can_stand_for(path):
    facts = exported(f"{TARGETS}:mixed", "-o", path, "--portable")
    assert (facts["calls"], facts["functions"]) == (1, {BRANCHES: 1})
    assert [(call["function"], call["kind"]) for call in facts["portable"]] == [(SCALE, "function"), (BRANCHES, "PythonOp")]
    report = json.loads(run("inspect", path, "--json").stdout)
    (left,), (made,), (link,) = report["rows"], report["portable"], report["links"]
    assert (left["function"], left["kind"]) == (BRANCHES, "PythonOp")
    assert left["opaque"].startswith("what it does depends on the values of a tensor")
    assert (made["function"], made["kind"], made["opaque"]) == (SCALE, "function", "")
    assert made["source"].startswith(f"{TARGETS}:")
    assert made["outputs"] == ["float[2, 3]"]
    assert (link["function"], link["once"], link["error"]) == (SCALE, False, None)
    assert link["backward"] == f"{link['name']}_backward"


def test_the_table(path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    exported(f"{TARGETS}:mixed", "-o", path, "--portable")
    result = run("inspect", path)
    assert result.exit_code == 0, result.output
    for text in ("1 ONNX function with a backward of its own, 1 PythonOp", "an ONNX function", "a PythonOp: what it does depends",
                 "Scale_backward", "again and again", f"{TARGETS}:"):  # fmt: skip
        assert text in result.stdout, text


def test_portable_only(path):
    facts = exported(f"{TARGETS}:mixed", "-o", path, "--portable-only", f"{TARGETS}:Sc*", "--portable-only", SCALE)
    assert [call["function"] for call in facts["portable"]] == [SCALE]
    assert facts["functions"] == {BRANCHES: 1}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--portable-only", BRANCHES], "no ONNX function can stand for it"),
        (["--portable-only", BRANCHES], "here: --portable in place of --portable-only"),
        (["--portable-only", f"{TARGETS}:Sacle"], f"portable='{TARGETS}:Sacle' means none of the Functions"),
        (["--portable-only", "pkg:"], "a pattern has a module"),
        (["--portable", "--portable-only", SCALE], "give one of them"),
    ],
)
def test_errors_leave_no_file(path, arguments, text):
    result = run("export", f"{TARGETS}:mixed", "-o", path, *arguments)
    assert result.exit_code == 2, result.output
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert not path.exists()


def test_a_case_says_it(path):
    """What the command line says stands in the place of what the case says."""
    assert {call["kind"] for call in exported(f"{TARGETS}:portable_case", "-o", path)["portable"]} == {"function"}
    assert ("com.microsoft", "PythonOp") not in operators(path)
    assert len(exported(f"{TARGETS}:portable_case", "-o", path, "--portable-only", SCALE)["portable"]) == 2


def test_gradients_and_dialects(path, tmp_path):
    """The training graph of such a file runs without anything of ours, too; its functions stand in files of any dialect."""
    exported(f"{TARGETS}:pair", "-o", path, "--portable", "--gradients", tmp_path / "training.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "training.onnx", providers=["CPUExecutionProvider"])
    feeds = {value.name: np.ones((2, 3), np.float32) for value in session.get_inputs()}
    assert all(np.isfinite(value).all() for value in session.run(None, feeds))
    exported(f"{TARGETS}:pair", "-o", path, "--portable", "--schema", "ort-1.16", "--opset", 18)
    assert onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def test_a_step(tmp_path):
    path = tmp_path / "step.onnx"
    result = run("step", f"{TARGETS}:scaled_step", "-o", path, "--portable", "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    (call,) = json.loads(result.stdout)["portable"]
    assert (call["function"], call["kind"], call["module"]) == (SCALE, "function", "1")
    assert onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).get_inputs()
    told = run("step", f"{TARGETS}:scaled_step", "-o", path, "--portable-only", "Scale")
    assert "calls that became ONNX functions: 1, that could not: 0" in told.stdout


@pytest.mark.usefixtures("quick_verify")
@pytest.mark.parametrize("arguments", [["--portable"], ["--portable-only", "Scale"], []])
def test_verify(arguments, monkeypatch):
    jobs = []
    from exporter.verification import verify as module

    original = module.run_in_a_fresh_process
    monkeypatch.setattr(module, "run_in_a_fresh_process", lambda *given, **more: jobs.append(given) or original(*given, **more))
    result = run("verify", f"{TARGETS}:pair", *arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    assert json.loads(result.stdout)["functions"] == {SCALE: 2}
    ((_, _, _, allow, setup, *_),) = jobs
    assert (allow, setup) == (([], None) if arguments else ([SCALE], f"{TARGETS}:pair"))


@pytest.mark.usefixtures("quick_verify")
def test_verify_inlines_where_it_is_told():
    result = run("verify", f"{TARGETS}:pair", "--inline", "Scale", "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    assert json.loads(result.stdout)["functions"] == {}
