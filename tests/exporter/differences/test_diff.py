"""What differs between two files, section by section."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch

import exporter
from exporter.differences.diff import Change, diff_files
from exporter.files.program import save_model
from symbolics.errors import FormatError
from symbolics.node.linked import Backward, Kept, Taken, write_backward
from symbolics.node.names import BACKWARD_KEY

TEXT = """<ir_version: 10, opset_import: ["": 20, "own": 1]> g (float[2, N] x, bool flag) => (float[2, N] y) <float[1] w = {1.0}> {
        [first] h = Softmax <axis = -1> (x) i = Mul(h, w)
        [branch] y = If (flag) <then_branch = yes () => (float[2, N] a) { a = Neg(i) }, else_branch = no () => (float[2, N] b) { b = own.f(i) }>
    }
    <domain: "own", opset_import: ["": 20]> f (x) => (y, e) { e = Exp(x) y = Neg(e) }
    <domain: "own", opset_import: ["": 20]> f_backward (g, e) => (gx) { gx = Mul(g, e) }
"""
LINK = Backward("own", "f_backward", (Taken("gradient", 0), Taken("output", 1)), (0,), (Kept(1, 2),), once=True)


def model(text=TEXT, link=None):
    made = ir.from_proto(onnx.parser.parse_model(text))
    if link is not None:
        made.functions["own", "f", ""].metadata_props[BACKWARD_KEY] = write_backward(link)
    return made


def changed(before, after):
    assert before in TEXT
    return diff_files(model(), model(TEXT.replace(before, after)))


def sections(found):
    return {key for key, value in found.as_json().items() if value and key != "equal"}


@pytest.mark.parametrize("name", ["plain", "op", "portable", "step", "gradient", "hostile", "empty"])
def test_a_file_equals_itself_written_again(samples, name, tmp_path):
    proto = onnx.load(samples[name])
    for i, node in enumerate(proto.graph.node):
        node.name = f"other{i}"
    onnx.save(proto, tmp_path / "again.onnx")
    found = diff_files(samples[name], tmp_path / "again.onnx")
    assert found.equal, found
    assert sections(found) == set()


def test_an_attribute_that_says_the_default():
    assert changed("Softmax <axis = -1>", "Softmax").equal
    found = changed("Softmax <axis = -1>", "Softmax <axis = 0>")
    assert found.nodes == [Change("changed", "Softmax 'first': axis", "not there", "0")]


@pytest.mark.parametrize("slope", [0.01, 0.2])
def test_floats_in_memory_are_those_of_the_file(slope, tmp_path):
    """A program holds the number that it was made with, a file has it in float32."""
    program = exporter.export(torch.nn.Sequential(torch.nn.LeakyReLU(slope), torch.nn.LayerNorm(4)), (torch.randn(2, 4),))
    program.save(tmp_path / "model.onnx")
    assert diff_files(tmp_path / "model.onnx", program).equal


def test_interface():
    found = changed("float[2, N] x, bool flag", "float[2, M] x, bool flag")
    assert found.interface == [Change("changed", "input x", "float[2, N]", "float[2, M]")]
    found = changed("(float[2, N] x, bool flag)", "(bool flag, float[2, N] x)")
    assert found.interface == [Change("changed", "the order of the inputs", "x, flag", "flag, x")]
    assert not found.nodes


def test_opsets():
    assert changed('["": 20, "own": 1]', '["": 21, "own": 1]').opsets == [Change("changed", "ai.onnx", "20", "21")]


def test_a_body_and_a_function_are_looked_into():
    found = changed("{ a = Neg(i) }", "{ a = Abs(i) }")
    assert {change.kind for change in found.nodes} == {"removed", "added"}
    assert all(change.what.startswith("If 'branch', body 0: ") for change in found.nodes), found.nodes
    assert found.operators == {"Abs": (0, 1), "Neg": (2, 1)}
    found = changed("e = Exp(x)", "e = Tanh(x)")
    assert {change.what for change in found.nodes} == {"function own::f: Exp ''", "function own::f: Tanh ''"}
    found = changed("f_backward (g, e) => (gx) { gx = Mul(g, e) }", "g_backward (g, e) => (gx) { gx = Mul(g, e) }")
    assert [change.kind for change in found.functions] == ["removed", "added"]


def test_links():
    found = diff_files(model(link=LINK), model(link=Backward("", "", (), (), (), once=True)))
    assert [(change.kind, change.what) for change in found.links] == [("changed", "own::f")]
    assert "own::f_backward" in found.links[0].a
    assert sections(found) == {"links"}


def test_weights_by_name_and_by_content(tmp_path):
    found = changed("{1.0}", "{1.5}")
    assert sections(found) == {"values"}
    assert (found.values[0].name, found.values[0].max_abs, found.values[0].equal) == ("w", 0.5, 0)
    renamed = model()
    value = renamed.graph.initializers.pop("w")
    value.name = "other"
    renamed.graph.initializers.add(value)
    assert diff_files(model(), renamed).equal
    assert sections(changed("Mul(h, w)", "Mul(h, h)")) == {"nodes"}


def test_an_infinite_difference_is_null_in_json():
    other = model()
    other.graph.initializers["w"].const_value = ir.tensor(np.float32([np.nan]), name="w")
    found = diff_files(model(), other)
    assert found.values[0].max_abs == float("inf")
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["values"][0]["max_abs"] is None


def test_calls_are_compared_without_names_and_numbers(samples, tmp_path):
    other = ir.load(samples["op"])
    nodes = [node for node in other.graph if node.op_type == "PythonOp"]
    calls = [json.loads(node.attributes["call"].value) for node in nodes]
    for number, call in enumerate(calls):
        call["id"] = str(number + 7)
    calls[1]["args"][1] = 3
    for node, call in zip(nodes, calls, strict=True):
        node.attributes["call"] = ir.AttrString("call", json.dumps(call, separators=(",", ":")))
    nodes[0].outputs[1].name = "renamed"
    save_model(other, tmp_path / "other.onnx")
    found = diff_files(samples["op"], tmp_path / "other.onnx")
    assert sections(found) == {"calls"}
    (change,) = found.calls
    assert change.what.endswith(": arguments")
    assert (change.a, change.b) == ("tensor 0, 2, 'mean'", "tensor 0, 3, 'mean'")


def test_a_call_more(samples):
    found = diff_files(samples["plain"], samples["op"])
    assert [change.kind for change in found.calls] == ["added", "added"]
    assert not found.equal


def test_gradients(samples):
    found = diff_files(samples["op"], samples["gradient"])
    assert Change("added", "gives a gradient of linear.bias", "", "reached") in found.gradients
    assert all(change.kind == "added" for change in found.nodes)
    assert len(found.gradients) == 4  # one is taken, of the output; three are given


def test_metadata(samples, tmp_path):
    other = ir.load(samples["step"])
    other.metadata_props["pythonop.step"] = other.metadata_props["pythonop.step"].replace('"lr":0.001', '"lr":0.5')
    other.metadata_props["team"] = "x" * 5000 + "a"
    save_model(other, tmp_path / "other.onnx")
    found = diff_files(samples["step"], tmp_path / "other.onnx")
    assert sections(found) == {"metadata"}
    assert [change.what for change in found.metadata] == ["training step: hyperparameters", "team"]
    assert len(found.metadata[1].b) <= 300
    other.metadata_props["team"] = "x" * 5000 + "b"  # what differs beyond what is shown differs
    assert [change.what for change in diff_files(tmp_path / "other.onnx", other).metadata] == ["team"]


def test_files_that_cannot_be_read(samples, tmp_path):
    with pytest.raises(FormatError, match="no ONNX model"):
        diff_files(samples["plain"], samples["damaged"])
    with pytest.raises(FormatError, match="cannot read"):
        diff_files(tmp_path / "none.onnx", samples["plain"])
    far = model()
    far.graph.initializers["w"].const_value = ir.tensor(np.ones(1000, np.float32), name="w")
    save_model(far, tmp_path / "far.onnx", external_data=True, check=False)
    for data in tmp_path.glob("*.data"):
        data.unlink()
    with pytest.raises(FormatError, match="which is not there"):
        diff_files(tmp_path / "far.onnx", samples["plain"])
