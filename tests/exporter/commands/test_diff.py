"""pythonop diff."""

from __future__ import annotations

import json

import onnx
import pytest

from tests.exporter.commands.test_cli import fails
from tests.processes import python


@pytest.mark.parametrize("name", ["plain", "op", "portable", "step", "gradient", "hostile", "empty"])
def test_equal_files(run, samples, name):
    result = run("diff", samples[name], samples[name])
    assert result.exit_code == 0, result.output
    assert "are equal" in " ".join(result.stdout.split())  # a long path is broken into lines
    result = run("diff", samples[name], samples[name], "--json")
    assert (result.exit_code, json.loads(result.stdout)["equal"]) == (0, True)


@pytest.mark.parametrize("name", ["op", "portable", "step", "gradient", "hostile", "empty"])
def test_files_that_differ(run, samples, name):
    result = run("diff", samples["plain"], samples[name], "--all")
    assert result.exit_code == 1, result.output
    assert result.stdout.replace("\n", "").isprintable()
    assert "nodes" in result.stdout
    found = json.loads(run("diff", samples["plain"], samples[name], "--json").stdout)
    assert not found["equal"]
    assert found["nodes"]


def test_the_lines(run, samples, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = run("diff", samples["op"], samples["gradient"]).stdout
    for line in (
        "  + input add_26_grad  float[batch, 3]",
        "  com.microsoft::PythonOpGrad  0 -> 2  +2",
        "  + com.microsoft::PythonOpGrad 'node_call__1_grad'  float[batch, 3]",
        "  + gives a gradient of linear.bias  reached",
    ):
        assert line in text, text


def test_a_weight(run, samples, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    proto = onnx.load(samples["plain"])
    weight = next(each for each in proto.graph.initializer if each.name == "2.bias")
    weight.raw_data = b"\0\0\0\0" + weight.raw_data[4:]
    onnx.save(proto, tmp_path / "other.onnx")
    result = run("diff", samples["plain"], tmp_path / "other.onnx")
    assert result.exit_code == 1
    assert "1 of 2" in next(line for line in result.stdout.splitlines() if "2.bias" in line)
    assert "1.0e+00" in result.stdout, "zero in place of a number differs by all of it"


def test_a_long_answer_is_cut(run, samples):
    text = run("diff", samples["plain"], samples["step"]).stdout
    assert "more: --all prints them" in text
    assert len(text) < len(run("diff", samples["plain"], samples["step"], "--all").stdout)


def test_what_cannot_be_read(run, samples, tmp_path):
    fails(run("diff", samples["plain"], samples["damaged"]), "error: ", "no ONNX model")
    fails(run("diff", tmp_path / "none.onnx", samples["plain"]), "cannot read")
    fails(run("diff", tmp_path, samples["plain"]), "cannot read")
    assert len(run("diff", samples["damaged"], samples["plain"]).stderr.splitlines()) <= 6


def test_needs_no_torch_and_imports_nothing(samples):
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('torch', 'tests', 'onnxruntime', 'pygraphviz'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from exporter.cli import main\n"
        f"main(['diff', {str(samples['op'])!r}, {str(samples['gradient'])!r}])\n"
    )
    done = python("-c", code)
    assert done.returncode == 1, done.stderr
    assert "PythonOpGrad" in done.stdout
