"""The schemas of both operators: what the checker refuses, and what inference finds."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from symbolics.node.attributes import GRAD_SPECS, SPECS
from symbolics.node.containers import Slot
from symbolics.node.names import ORT_DOMAIN
from symbolics.node.schema import register
from tests.symbolics.node.node_models import call_of, check, model_of, node_of

X = Slot(0)


@pytest.mark.parametrize(("op_type", "specs"), [("PythonOp", SPECS), ("PythonOpGrad", GRAD_SPECS)])
def test_the_schema_is_registered(op_type, specs):
    register()  # a second time changes nothing
    schema = onnx.defs.get_schema(op_type, ORT_DOMAIN)
    assert schema.since_version == 1
    assert {name: (a.type.name, a.required) for name, a in schema.attributes.items()} == {
        name: (kind.name, required) for name, (kind, required, _) in specs.items()
    }
    assert all(a.description for a in schema.attributes.values())


@pytest.mark.parametrize(
    ("op_type", "attribute"),
    [
        (op, name)
        for op, specs in (("PythonOp", SPECS), ("PythonOpGrad", GRAD_SPECS))
        for name, (_, required, _) in specs.items()
        if required
    ],
)
def test_the_checker_refuses_a_missing_attribute(op_type, attribute):
    model = model_of(call_of(X), gradient=True)
    check(model)
    del node_of(model, op_type).attributes[attribute]
    with pytest.raises(onnx.checker.ValidationError, match=attribute):
        onnx.checker.check_model(ir.to_proto(model))


@pytest.mark.parametrize("op_type", ["PythonOp", "PythonOpGrad"])
def test_the_checker_refuses_other_attributes_and_types(op_type):
    model = model_of(call_of(X), gradient=True)
    node_of(model, op_type).attributes.add(ir.Attr("extra", ir.AttributeType.INT, 1))
    with pytest.raises(onnx.checker.ValidationError, match="extra"):
        onnx.checker.check_model(ir.to_proto(model))
    model = model_of(call_of(X), gradient=True)
    node_of(model, op_type).attributes.add(ir.Attr("name", ir.AttributeType.INT, 1))
    with pytest.raises(onnx.checker.ValidationError, match="name"):
        onnx.checker.check_model(ir.to_proto(model))


def _inferred(model, name):
    model.graph.outputs.clear()
    for node in model.graph:
        for value in node.outputs:
            value.type = value.shape = None
    proto = onnx.shape_inference.infer_shapes(ir.to_proto(model), check_type=True, strict_mode=True, data_prop=True)
    return next(v.type.tensor_type for v in proto.graph.value_info if v.name == name)


def test_inference():
    call = call_of(
        X, Slot(1), outputs=(Slot(0), Slot(1)), input_types=(10, 1), input_ranks=(1, 4), output_types=(16, 9), output_ranks=(3, 0)
    )
    found = {name: _inferred(model_of(call, gradient=True), name) for name in ("ctx", "y0", "y1", "x0_grad", "x1_grad")}
    assert {name: (t.elem_type, len(t.shape.dim), t.HasField("shape")) for name, t in found.items()} == {
        "ctx": (7, 0, True),
        "y0": (16, 3, True),
        "y1": (9, 0, True),
        "x0_grad": (10, 1, True),
        "x1_grad": (1, 4, True),
    }
    assert not any(d.HasField("dim_value") for d in found["y0"].shape.dim)


def test_inference_keeps_the_dims_of_value_info():
    model = model_of(call_of(X, output_ranks=(2,)))
    model.graph.outputs[0].shape = ir.Shape(["batch", 3])
    proto = onnx.shape_inference.infer_shapes(ir.to_proto(model), strict_mode=True)
    assert [d.dim_param or d.dim_value for d in proto.graph.output[0].type.tensor_type.shape.dim] == ["batch", 3]


def test_inference_refuses_a_contradiction():
    model = model_of(call_of(X, output_ranks=(2,)))
    model.graph.outputs[0].shape = ir.Shape([1, 2, 3])
    with pytest.raises(onnx.shape_inference.InferenceError, match="rank"):
        onnx.shape_inference.infer_shapes(ir.to_proto(model), strict_mode=True)
