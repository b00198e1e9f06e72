"""What is no valid ONNX, or what onnxruntime does not open, is told by the node, its module and line; nothing is imported or changed."""

from __future__ import annotations

import sys

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import exporter
from exporter.runtime import usable
from exporter.runtime.usable import check_usable
from symbolics.errors import ExportError
from tests.exporter.commands import cli_targets

pytestmark = pytest.mark.unusable(reason="broken on purpose")


def model_of(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(text))


ADD = '<ir_version: 10, opset_import: ["": 20]> g (float[3] x) => (float[3] y) { y = Add(x, x) }'


def test_types_that_contradict_each_other():
    model = model_of(ADD.replace("y = Add(x, x)", "z = Cast <to = 11> (x) y = Add(x, z)"))
    for number, node in enumerate(model.graph):
        node.name = f"n{number}"
    with pytest.raises(ExportError, match=r"(?s)not valid ONNX.*\n  node: Add 'n1'$"):
        check_usable(model)


def test_an_output_without_a_shape():
    """As the norm of a step with clip_norm was."""
    model = model_of(ADD)
    model.graph.outputs[0].shape = None
    with pytest.raises(ExportError, match=r"its output 'y' has no shape, not even a rank\n  node: Add"):
        check_usable(model)


def test_no_kernel_for_the_type(dynamo):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(x)

    program = exporter.export(Net().bfloat16(), (torch.randn(8, 4).bfloat16(),), dynamo=dynamo)
    with pytest.raises(
        ExportError,
        match=r"(?s)NOT_IMPLEMENTED.*export the model in float32 .*, or write that operator in others\n  node: Gemm .*, in module head",
    ) as caught:
        check_usable(program.model)
    assert not dynamo or "at test_usable.py:" in str(caught.value)


@pytest.fixture(scope="module")
def program():
    case = cli_targets.case()
    return exporter.export(case.model, case.args)


def test_python_ops_of_every_kind_open_without_their_functions(program, monkeypatch):
    tangents, gradients = exporter.build_tangent_graph(program), exporter.build_gradient_graph(program)
    seconds = exporter.build_gradient_graph(gradients)
    for model in (program.model, gradients, seconds, tangents):
        clone = model.clone()
        for node in clone.graph:
            if "name" in node.attributes:
                node.attributes["name"] = ir.AttrString("name", "nowhere.to.be.found:Scale")
        assert check_usable(clone) == ""
    assert "nowhere" not in sys.modules


def test_a_node_of_ours_that_is_damaged(program):
    model = program.model.clone()
    node = next(node for node in model.graph if node.op_type == "PythonOp")
    node.attributes["call"] = ir.AttrString("call", "{")
    with pytest.raises(ExportError, match="onnxruntime cannot open the model: PythonOp .*: it is not JSON"):
        check_usable(model)


def test_the_model_stays_as_it_is(program):
    model = exporter.build_gradient_graph(exporter.export(nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)), (torch.randn(2, 20),)))
    before = ir.to_proto(model).SerializeToString()
    assert check_usable(model) == ""
    assert ir.to_proto(model).SerializeToString() == before


def test_what_is_not_opened_is_said(monkeypatch):
    monkeypatch.setattr(usable, "_MOST", 0)
    assert check_usable(model_of(ADD)) == "it has 1 nodes, more than 0"
    monkeypatch.setattr("exporter.runtime.usable.available", lambda proto: "there is no onnxruntime")
    monkeypatch.setattr(usable, "_MOST", 10)
    assert check_usable(model_of(ADD)) == "there is no onnxruntime"
