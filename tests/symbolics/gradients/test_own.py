"""A gradient rule of somebody's own is not in the file: the file says that there was one, and who differentiates without it is told."""

from __future__ import annotations

import json

import onnx
import onnx_ir as ir
import pytest
import torch

import exporter
from exporter.files.program import Program
from symbolics.errors import FormatError
from symbolics.gradients import RULES
from symbolics.node.names import RULES_KEY

TEXT = """
<ir_version: 8, opset_import: ["": 18, "mylib": 1]>
g (float[N, 4] x) => (float[N, 4] y) { z = mylib.Clipped(x) y = Relu(z) }
<domain: "mylib", opset_import: ["": 18]>
Clipped (x) => (y) { lo = Constant<value_float=-1.0>() hi = Constant<value_float=1.0>() y = Clip(x, lo, hi) }
"""
HERE = __name__


def _rule(op, g, x):
    return g


@pytest.fixture
def rule(monkeypatch):
    """A rule that another process may lack."""
    for key in (("mylib", "Clipped"), ("", "Relu")):
        monkeypatch.setitem(RULES, key, RULES.get(key))
        if RULES[key] is None:
            monkeypatch.delitem(RULES, key)
    exporter.gradient("Clipped", domain="mylib")(_rule)


@pytest.fixture
def path(rule, tmp_path):
    path = tmp_path / "model.onnx"
    Program(ir.from_proto(onnx.parser.parse_model(TEXT))).save(path)
    return path


def test_a_file_says_which_operators_had_a_rule(path):
    """Those that the file has, and the rules that are not ours."""
    assert json.loads(ir.load(path).metadata_props[RULES_KEY]) == {"mylib::Clipped": f"{HERE}:_rule"}


def test_a_standard_operator_with_another_rule(rule, tmp_path, monkeypatch):
    before = RULES["", "Relu"]
    exporter.gradient("Relu")(lambda op, g, x: g)
    Program(ir.from_proto(onnx.parser.parse_model(TEXT))).save(tmp_path / "model.onnx")
    monkeypatch.setitem(RULES, ("", "Relu"), before)
    with pytest.warns(exporter.PythonopWarning, match=r"Relu had a gradient rule of its own .* its gradient is the usual one"):
        exporter.build_gradient_graph(tmp_path / "model.onnx")


def _load(path):
    """A loaded module builds its gradient when it is asked for it."""
    exporter.load(path)(torch.ones(2, 4, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("build", [exporter.build_gradient_graph, _load], ids=["graph", "load"])
def test_who_lacks_the_rule_is_told(build, path, monkeypatch, recwarn):
    build(path)
    assert not [each for each in recwarn if issubclass(each.category, exporter.PythonopWarning)]
    monkeypatch.delitem(RULES, ("mylib", "Clipped"))
    with pytest.warns(exporter.PythonopWarning, match=r"mylib::Clipped had a gradient rule.*the derivative of its body.*setup="):
        build(path)


def test_a_rule_for_one_model_is_one(path, monkeypatch, recwarn):
    monkeypatch.delitem(RULES, ("mylib", "Clipped"))
    exporter.build_gradient_graph(path, overrides={("mylib", "Clipped"): _rule})
    assert not [each for each in recwarn if issubclass(each.category, exporter.PythonopWarning)]


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1}', '{"a": {"b": 1}}'])
def test_damaged_rules(text, path):
    model = ir.load(path)
    model.metadata_props[RULES_KEY] = text
    with pytest.raises(FormatError, match=r"pythonop\.rules"):
        exporter.build_gradient_graph(model)
