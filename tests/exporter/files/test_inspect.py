"""What a file says about functions with their own backward, and about PythonOps that a portable file was to do without."""

from __future__ import annotations

import json

import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from click.testing import CliRunner

from exporter.cli import main
from exporter.files.inspect import LinkFacts, inspect_model
from symbolics.node.containers import Slot
from symbolics.node.linked import Backward, Kept, Taken, write_backward
from symbolics.node.names import BACKWARD_KEY, FUNCTION_KEY, MODULE_PROPERTY, OPAQUE_PROPERTY, SOURCE_PROPERTY
from tests.symbolics.node.node_models import call_of, model_of, node_of

TEXT = """<ir_version: 10, opset_import: ["": 20, "own": 1]> g (float[2, N] x, bool flag, int64 n) => (float[2, N] y) {
        [first] h, e = own.f(x, n)
        y = If (flag) <then_branch = yes () => (float[2, N] a) { [second] a, k = own.f(h, n) }, else_branch = no () => (float[2, N] b) { b = own.plain(h) }>
    }
    <domain: "own", opset_import: ["": 20]> f (x, n) => (y, e) { e = Exp(x) y = Neg(e) }
    <domain: "own", opset_import: ["": 20]> f_backward (g, e) => (gx) { gx = Mul(g, e) }
    <domain: "own", opset_import: ["": 20]> plain (x) => (y) { y = Neg(x) }
"""
LINK = Backward("own", "f_backward", (Taken("gradient", 0), Taken("output", 1)), (0,), (Kept(1, 2),), once=True)


def model_with(link: str) -> ir.Model:
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(TEXT)))
    model.functions["own", "f", ""].metadata_props.update({BACKWARD_KEY: link, FUNCTION_KEY: "mypkg.ops:F"})
    node = model.graph[0]
    node.metadata_props.update({MODULE_PROPERTY: "body.0", SOURCE_PROPERTY: "mypkg.models:7"})
    return model


def test_calls_of_functions_and_their_links():
    facts = inspect_model(model_with(write_backward(LINK)))
    assert facts.links == [LinkFacts("own::f", "mypkg.ops:F", "own::f_backward", once=True)]
    assert facts.rows == []
    first, second = facts.portable
    assert (first.function, first.kind, first.node, first.graph) == ("mypkg.ops:F", "function", "first", "")
    assert (first.module, first.source) == ("body.0", "mypkg.models:7")
    assert first.arguments == ["x", "n"]
    assert first.inputs == ["float[2, N]", "int64[]"]
    assert len(first.outputs) == 1  # what is kept for the backward is no output of the Function
    assert (second.node, second.graph) == ("second", "subgraph yes")


def test_a_function_that_has_no_gradient():
    facts = inspect_model(model_with(write_backward(Backward("", "", (), (), (), once=True))))
    assert facts.links == [LinkFacts("own::f", "mypkg.ops:F")]
    assert len(facts.portable[0].outputs) == 2


@pytest.mark.parametrize("text", ["{", "\x1b[31m", write_backward(LINK).replace("f_backward", "gone\\u001b")])
def test_a_damaged_link_is_said_in_its_row(text, tmp_path):
    model = model_with(text)
    facts = inspect_model(model)
    assert facts.links[0].error.startswith("metadata pythonop.backward of the function 'f'")
    assert len(facts.portable) == 2
    ir.save(model, tmp_path / "model.onnx")
    told = CliRunner().invoke(main, ["inspect", str(tmp_path / "model.onnx")])
    assert told.exit_code == 1
    assert "damaged" in told.stdout
    assert "1 of 1 links of functions to their backward cannot be read" in told.stderr
    assert "\x1b" not in told.stdout + told.stderr
    as_json = CliRunner().invoke(main, ["inspect", "--json", str(tmp_path / "model.onnx")])
    assert (as_json.exit_code, json.loads(as_json.stdout)["links"][0]["error"]) == (1, facts.links[0].error)


def test_why_a_call_is_a_python_op():
    model = model_of(call_of(Slot(0)))
    node_of(model).metadata_props[OPAQUE_PROPERTY] = "it draws random numbers (aten.rand)"
    (row,) = inspect_model(model).rows
    assert (row.kind, row.opaque) == ("PythonOp", "it draws random numbers (aten.rand)")
