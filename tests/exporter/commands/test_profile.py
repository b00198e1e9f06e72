"""pythonop profile."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.exporter.commands.test_cli import TARGETS, fails

ALLOW = ("--allow", f"{TARGETS}:*", "--times", "2")


@pytest.mark.parametrize(("name", "python"), [("plain", 0), ("op", 2), ("portable", 0), ("step", 2), ("gradient", 4), ("hostile", 0)])
def test_profile(run, samples, name, python):
    result = run("profile", samples[name], *ALLOW, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert sum(bool(row["function"]) for row in found["nodes"]) == python
    assert (found["runs"], found["python"] > 0) == (2, python > 0)
    assert found["nodes"]
    assert sum(row["seconds"] for row in found["operators"]) == pytest.approx(sum(row["seconds"] for row in found["nodes"]))


def test_the_tables(run, samples, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "160")
    page = tmp_path / "flame.html"
    result = run("profile", samples["gradient"], *ALLOW, "--top", 2, "--html", page)
    assert result.exit_code == 0, result.output
    for text in ("PythonOps ", "median of 2", "gradient", "PythonOpGrad Scale", "more: --top", "Module", f"wrote {page}"):
        assert text in result.stdout.replace("\n", " ") or text in result.stdout.replace("\n", ""), text
    assert page.read_text().startswith("<!doctype html>")


def test_a_hostile_file_is_printed_cleanly(run, samples):
    result = run("profile", samples["hostile"], "--times", 1)
    assert result.exit_code == 0, result.output
    assert result.stdout.replace("\n", "").isprintable()


def test_inputs_as_run_takes_them(run, samples, tmp_path):
    np.savez(tmp_path / "x.npz", input=np.ones((5, 3), np.float32))
    assert run("profile", samples["plain"], "--inputs", tmp_path / "x.npz", "--times", 1).exit_code == 0
    assert run("profile", samples["plain"], "--dim", "batch=7", "--times", 1).exit_code == 0
    np.savez(tmp_path / "z.npz", nobody=np.ones(1))
    fails(run("profile", samples["plain"], "--inputs", tmp_path / "z.npz"), "the file has no input 'nobody'")
    fails(run("profile", samples["plain"], "--inputs", tmp_path / "none.npz"), "cannot read the inputs")
    fails(run("profile", samples["plain"], "--dim", "batch"), "NAME=SIZE")


def test_what_cannot_be_profiled(run, samples, tmp_path):
    fails(run("profile", samples["op"]), "not allowed")
    fails(run("profile", samples["damaged"]), "no ONNX model")
    fails(run("profile", samples["empty"]), "error: ")
    fails(run("profile", samples["plain"], "--html", tmp_path / "no" / "f.html"), "cannot write")
    assert all(len(run("profile", samples[name]).stderr.splitlines()) <= 6 for name in ("op", "damaged", "empty"))
