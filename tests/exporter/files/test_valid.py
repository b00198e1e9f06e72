"""What is saved passes onnx.checker, or nothing is written."""

from __future__ import annotations

import io

import onnx
import onnx_ir as ir
import pytest
import torch

import exporter
from exporter.files.program import Program
from symbolics.errors import ExportError

pytestmark = pytest.mark.unusable(reason="broken on purpose")


def broken() -> Program:
    text = '<ir_version: 10, opset_import: ["": 20]> g (float[3] x) => (double[3] y) { y = Add(x, x) }'
    return Program(ir.from_proto(onnx.parser.parse_model(text)))


@pytest.mark.parametrize("schema", [None, "documented"])
def test_a_file_that_is_there_stays(tmp_path, schema):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"before")
    with pytest.raises(ExportError, match="not valid ONNX, as onnx.checker says"):
        broken().save(path, schema)
    assert path.read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 1
    broken().save(path, schema, check=False)
    assert ir.load(path).graph.node(0).op_type == "Add"


def test_a_step_and_its_start_are_both_written_or_neither(tmp_path):
    step = exporter.export_training_step(
        torch.nn.Linear(3, 2), (torch.randn(4, 3),), loss=torch.nn.functional.mse_loss, targets=(torch.randn(4, 2),), clip_norm=1.0
    )
    onnx.checker.check_model(step.model_proto, full_check=True)
    step.model.graph.outputs[-1].shape = None
    with pytest.raises(ExportError, match="has no shape"):
        step.save(tmp_path / "step.onnx")
    assert not list(tmp_path.iterdir())
    step.save(tmp_path / "step.onnx", check=False)
    assert len(list(tmp_path.iterdir())) == 2


def test_weights_of_no_type_of_their_own_and_values_in_other_files(tmp_path):
    """An initializer has its tensor's type; what a Constant has in another file is read for the checker."""
    weight = torch.arange(400.0)
    value = ir.Value(name="w", const_value=ir.tensor(weight.numpy(), name="w"))
    (tmp_path / "data").write_bytes(weight.numpy().tobytes())
    tensor = ir.ExternalTensor("data", 0, 1600, ir.DataType.FLOAT, shape=ir.Shape([400]), name="k", base_dir=tmp_path)
    constant = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], name="c")
    add = ir.Node("", "Add", [value, constant.outputs[0]], name="a")
    out = add.outputs[0]
    out.name, out.type, out.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape([400])
    graph = ir.Graph([], [out], nodes=[constant, add], initializers=[value], opset_imports={"": 20}, name="g")
    program = Program(ir.Model(graph, ir_version=10))
    program.save(tmp_path / "m.onnx")
    assert value.type is None and constant.attributes["value"].as_tensor() is tensor
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)


def test_torchs_own_saving_is_checked_too(monkeypatch, tmp_path, dynamo):
    """Under hook(), also where somebody leaves the weights out, which are inputs then."""

    def refused(model):
        raise ExportError("checked")

    monkeypatch.setattr("exporter.forward.session.check_valid", refused)
    monkeypatch.setattr("exporter.files.program.check_valid", refused)
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    for place in (tmp_path / "m.onnx", io.BytesIO()):
        for held in (True, False):
            with exporter.hook(), pytest.raises(ExportError, match="checked"):
                torch.onnx.export(model, (x,), place, dynamo=dynamo, export_params=held)


class Product(torch.nn.Module):
    def forward(self, x):
        return torch.einsum("ij,kj->ik", x, x)


@pytest.mark.parametrize(
    ("model", "shape", "way_out"),
    [
        (torch.nn.Conv1d(2, 2, 2), (1, 2, 4), "opset_version=22, from which on Conv takes bfloat16"),
        (torch.nn.Softplus(), (2, 3), "opset_version=22, from which on Softplus takes bfloat16"),
        (Product(), (3, 2), r"float32 \(x.float\(\)\): no Einsum of ONNX takes bfloat16"),
    ],
    ids=["Conv", "Softplus", "Einsum"],
)
def test_an_operator_without_bfloat16_is_refused_when_it_is_exported(model, shape, way_out, dynamo):
    model, x = model.bfloat16(), torch.randn(shape).bfloat16()
    with pytest.raises(ExportError, match=rf"unsupported type: tensor\(bfloat16\)\n  node: .*\n  way out: .*{way_out}"):
        exporter.export(model, (x,), dynamo=dynamo, opset_version=18)
    if "22" in way_out:
        onnx.checker.check_model(exporter.export(model, (x,), dynamo=dynamo, opset_version=22).model_proto, full_check=True)
    plain = exporter.export(torch.nn.Linear(3, 3).bfloat16(), (torch.randn(2, 3).bfloat16(),), dynamo=dynamo)
    onnx.checker.check_model(plain.model_proto, full_check=True)
