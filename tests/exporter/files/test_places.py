"""The part and the module of each node."""

from __future__ import annotations

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from exporter.files.places import Places, path_in_name
from exporter.files.read import open_model
from symbolics.graph.values import scope_of


def places_of(path):
    model = open_model(path)
    places = Places(model)
    return [(node, places.part(node), places.module(node)) for node in model.graph]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("/blocks/blocks.0/up/Gemm", "blocks.0.up"),
        ("/embed/Gemm", "embed"),
        ("layer1/conv/Conv2D", "layer1.conv"),
        ("Gemm_3", ""),
        ("", ""),
        ("//", ""),
    ],
)
def test_a_path_in_a_name(name, path):
    assert path_in_name(name) == path


@pytest.mark.parametrize(
    ("scopes", "path"),
    [
        (["", "model", "model.head", "linear_8"], "model.head"),
        (["_empty_nn_module_stack_from_metadata_hook", "add_3"], ""),
        (["", "_empty_nn_module_stack_from_metadata_hook", "add_3"], ""),
        (["", "model", "_empty_nn_module_stack_from_metadata_hook", "add_3"], "model"),
    ],
)
def test_scopes_that_torch_writes(scopes, path):
    assert scope_of(ir.Node("", "Relu", [None], metadata_props={"pkg.torch.onnx.name_scopes": str(scopes)})) == path


@pytest.mark.parametrize("text", ["[", "['']", "7", "[[]]" * 5000, "(" * 9000, "__import__('os')"])
def test_a_text_of_scopes_that_is_none(text):
    node = ir.Node("", "Relu", [None], metadata_props={"pkg.torch.onnx.name_scopes": text})
    assert scope_of(node) == ""


def test_a_forward_has_one_part(samples):
    assert {part for _, part, _ in places_of(samples["op"])} == {"forward"}
    assert {(node.op_type, module) for node, _, module in places_of(samples["plain"])} == {("Gemm", "0"), ("Relu", "1"), ("Gemm", "2")}


def test_a_gradient_stands_in_the_module_of_what_it_reads(samples):
    found = places_of(samples["gradient"])
    assert {part for node, part, _ in found if node.op_type == "PythonOpGrad"} == {"gradient"}
    assert {module for node, part, module in found if part == "gradient" and node.op_type in ("Gemm", "ReduceSum")} == {"linear"}
    assert {part for node, part, _ in found if node.op_type in ("PythonOp", "StopGradient")} == {"forward"}


def test_a_training_step_has_three_parts(samples):
    found = places_of(samples["step"])
    assert [part for _, part, _ in found if part == "forward"]
    updates = [module for node, part, module in found if part == "update" and any(o.name.startswith("param.") for o in node.outputs)]
    assert updates
    assert set(updates) == {"0"}, "the layer whose parameters are updated"
    assert {module for node, _, module in found if node.op_type == "PythonOpGrad"} == {"1"}
    assert {part for node, part, _ in found if node.op_type == "PythonOpGrad"} == {"gradient"}


def test_a_file_of_another_tool():
    text = """<ir_version: 10, opset_import: ["": 20]> g (float[2] x) => (float[2] y) { [ "/body/Relu" ] a = Relu(x) y = Neg(a) }"""
    model = ir.from_proto(onnx.parser.parse_model(text.replace('[ "/body/Relu" ]', "")))
    model.graph[0].name = "/body/Relu"
    places = Places(model)
    assert [places.module(node) for node in model.graph] == ["body", ""]


def test_a_file_of_tangents(samples):
    import exporter

    model = exporter.build_tangent_graph(samples["op"])
    places = Places(model)
    found = {(node.op_type, places.part(node)) for node in model.graph}
    assert ("PythonOpTangent", "forward") in found, "it gives the outputs of the forward, too"
    assert {part for _, part in found} == {"forward", "tangent"}
    assert len([node for node in model.graph if places.part(node) == "forward"]) == len(open_model(samples["op"]).graph)
