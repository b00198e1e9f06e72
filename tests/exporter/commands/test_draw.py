"""pythonop draw."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from exporter.pictures import layout
from tests.exporter.commands.test_cli import fails
from tests.support import missing


@pytest.fixture
def graphviz():
    if layout.missing() is not None:
        missing("pygraphviz", "pygraphviz is not installed: nothing lays out a picture")


@pytest.mark.parametrize("name", ["plain", "op", "portable", "step", "gradient", "hostile", "empty"])
@pytest.mark.parametrize("kind", ["svg", "html"])
def test_draw(graphviz, run, samples, name, kind, tmp_path):
    path = tmp_path / f"graph.{kind}"
    result = run("draw", samples[name], "-o", path)
    assert result.exit_code == 0, result.output
    text = path.read_text()
    assert text.startswith("<svg" if kind == "svg" else "<!doctype html>")
    if kind == "svg":
        ET.fromstring(text)
    facts = json.loads(run("draw", samples[name], "-o", path, "--json").stdout)
    assert facts == {"file": str(path), "bytes": len(text.encode())}
    assert path.read_text() == text, "the same file makes the same picture"


def test_depth(graphviz, run, samples, tmp_path):
    sizes = []
    for depth in (0, 1, 9):
        assert run("draw", samples["step"], "-o", tmp_path / "g.svg", "--depth", depth).exit_code == 0
        sizes.append((tmp_path / "g.svg").read_text().count('class="box'))
    assert sizes[0] < sizes[1] < sizes[2]


def test_what_cannot_be_drawn(graphviz, run, samples, tmp_path):
    path = tmp_path / "g.svg"
    fails(run("draw", samples["damaged"], "-o", path), "no ONNX model")
    fails(run("draw", samples["plain"], "-o", tmp_path / "g.png"), "pictures are .svg or .html")
    fails(run("draw", samples["plain"], "-o", tmp_path / "no" / "g.svg"), "cannot write")
    fails(run("draw", tmp_path / "none.onnx", "-o", path), "cannot read")
    assert not path.exists()


def test_without_graphviz(run, samples, tmp_path, monkeypatch):
    monkeypatch.setattr(layout.importlib.util, "find_spec", lambda name: None)
    fails(run("draw", samples["plain"], "-o", tmp_path / "g.svg"), "pip install '.[draw]' in a clone")
    assert not list(tmp_path.iterdir())


def test_a_graph_that_graphviz_dies_of(run, samples, tmp_path, monkeypatch):
    """It dies in a process of its own."""
    monkeypatch.setattr(layout, "missing", lambda: None)
    monkeypatch.setattr(layout.sys, "executable", "/bin/false")
    fails(run("draw", samples["plain"], "-o", tmp_path / "g.svg"), "Graphviz failed", "--depth")
    assert not list(tmp_path.iterdir())
