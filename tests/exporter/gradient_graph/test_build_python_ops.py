"""PythonOps in build_gradient_graph: pairs, orders, and nodes that a file damages."""

from __future__ import annotations

import onnx
import onnx.helper as oh
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import TensorProto

from exporter.files.inspect import inspect_model
from exporter.gradient_graph.build import build_gradient_graph
from exporter.gradient_graph.inference import infer_shapes
from symbolics.errors import FormatError, UnsupportedOperatorError
from symbolics.node.attributes import ir_attributes, values_of
from symbolics.node.containers import Slot
from tests.symbolics.node import node_models


def python_op_model() -> onnx.ModelProto:
    node = oh.make_node("PythonOp", ["x", "u"], ["", "y", "z"], domain="com.microsoft")
    attributes = {
        "name": "pkg:F", "input_convention": "dcd", "input_requires_grads": [1, 0, 1], "input_tensor_types": [1, 1], "input_tensor_ranks": [1, 1],
        "output_tensor_types": [1, 1], "output_tensor_ranks": [1, 1], "output_tensor_requires_grads": [1, 1], "inplace": 0, "training_mode": 1,
        "input_int_scalars": [3], "input_int_scalar_positions": [1],
    }  # fmt: skip
    node.attribute.extend(oh.make_attribute(k, v) for k, v in attributes.items())
    value = lambda n: oh.make_tensor_value_info(n, TensorProto.FLOAT, [2])  # noqa: E731
    graph = oh.make_graph([node, oh.make_node("Exp", ["y"], ["e"])], "m", [value("x"), value("u")], [value("e"), value("z")])
    return oh.make_model(graph, opset_imports=[oh.make_opsetid("", 20), oh.make_opsetid("com.microsoft", 1)], ir_version=9)


def test_python_op_and_its_grad_are_paired():
    training = build_gradient_graph(python_op_model(), wrt=["u"], outputs=["e"])
    forward = next(n for n in training.graph if n.op_type == "PythonOp")
    backward = next(n for n in training.graph if n.op_type == "PythonOpGrad")
    assert forward.outputs[0].name
    assert backward.inputs[0] is forward.outputs[0]
    assert backward.inputs[1] is not None
    assert backward.inputs[2] is None
    assert list(backward.inputs[3:]) == list(forward.outputs[1:])
    assert [o.name for o in backward.outputs] == ["", "u_grad"]
    assert list(backward.attributes["output_tensor_requires_grads"].value) == [0, 1]


def test_a_backward_of_a_python_ops_backward_is_a_node_of_the_next_order():
    second = build_gradient_graph(build_gradient_graph(python_op_model()))
    found = [node for node in second.graph if node.op_type == "PythonOpBackward"]
    assert [node.domain for node in found] == ["pythonop"] * 3
    assert sorted(node.attributes["order"].as_int() for node in found) == [1, 1, 2]
    assert [node.attributes["readers"].as_int() for node in found if node.attributes["order"].as_int() == 1] == [2, 2]
    assert not any(node.op_type == "PythonOpGrad" for node in second.graph)
    assert second.opset_imports["pythonop"] == 1
    onnx.checker.check_model(ir.to_proto(second))


def test_a_context_out_of_a_loop_is_refused_by_name():
    """Its PythonOp is in a body that the gradient graph does not see."""
    training = build_gradient_graph(python_op_model())
    grad = next(node for node in training.graph if node.op_type == "PythonOpGrad")
    context = grad.inputs[0]
    copied = ir.node("Identity", [context])
    copied.outputs[0].name, copied.outputs[0].type = "carried", context.type
    training.graph.insert_before(grad, copied)
    grad.replace_input_with(0, copied.outputs[0])
    with pytest.raises(UnsupportedOperatorError, match=r"PythonOpGrad.*'?pkg:F'? is differentiated again.*Loop, Scan or If"):
        build_gradient_graph(training)


@pytest.mark.parametrize(
    "changes",
    [
        {"output_tensor_types": []}, {"output_tensor_types": [1, 1]}, {"output_tensor_types": [99]}, {"output_tensor_types": [-1]}, {"output_tensor_ranks": []},
        {"output_tensor_ranks": [1 << 31]}, {"output_tensor_ranks": [-1]}, {"output_tensor_ranks": [1, 1]}, {"input_convention": "dd"}, {"input_requires_grads": []},
        {"input_tensor_types": []}, {"input_tensor_types": [1, 1]},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_python_op_is_a_format_error(changes):
    model = node_models.model_of(node_models.call_of(Slot(0)))
    node = node_models.node_of(model)
    for attribute in ir_attributes({**values_of(node), **changes}):
        node.attributes[attribute.name] = attribute
    for value in node.outputs:
        value.shape = None
    with pytest.raises(FormatError, match="PythonOp|Fn"):
        build_gradient_graph(model)
    row = inspect_model(model).rows[0]
    assert row.error is not None


def test_a_python_op_without_outputs():
    """The schema says that the context may be left out: there is nothing to type then."""
    model = node_models.model_of(node_models.call_of(Slot(0), outputs=()))
    node = node_models.node_of(model)
    bare = ir.Node(node.domain, node.op_type, node.inputs, list(node.attributes.values()), num_outputs=0)
    model.graph.append(bare)
    infer_shapes(model)
    assert node.outputs[0].dtype is ir.DataType.INT64
