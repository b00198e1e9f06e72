"""Which provider runs what."""

from __future__ import annotations

import onnx
import onnx.parser
import pytest
import torch

from exporter.runtime.placements import placements, said_of_placements
from symbolics.errors import ArgumentError, RunError
from tests.exporter.runtime.build import forward, record
from tests.zoo import functions as F

CPU = "CPUExecutionProvider"
PLAIN = """<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y) { h = Sin (x) y = Cos (h) }"""


def test_operators_by_provider():
    assert placements(onnx.parser.parse_model(PLAIN), ["cpu"]) == {CPU: {"Sin": 1, "Cos": 1}}


def test_functions_of_python_ops_are_not_looked_for():
    proto = forward(record(F.SavesInput, torch.randn(2, 4, requires_grad=True)))
    assert placements(proto, ["cpu"]) == {CPU: {"PythonOp": 1}}


def test_what_cannot_be_opened():
    proto = onnx.parser.parse_model(PLAIN)
    proto.graph.node[0].op_type = "Nothing"
    with pytest.raises(RunError, match="Nothing"):
        placements(proto, ["cpu"])
    with pytest.raises(ArgumentError, match="no execution provider rocket"):
        placements(onnx.parser.parse_model(PLAIN), ["rocket"])


def test_in_words():
    assert said_of_placements({"Fast": {"Conv": 3, "Add": 2}, CPU: {"Cast": 2}}) == ["Fast runs 5 nodes", f"{CPU} runs 2 nodes: 2 Cast"]
    assert said_of_placements({"Fast": {"Conv": 3}}) == ["Fast runs 3 nodes", f"no node is left to {CPU}"]
    assert said_of_placements({CPU: {"Cast": 2}}) == [f"{CPU} runs 2 nodes"]
