"""PythonOpBackward in a file: its schema, what inspect says of it, and that other dialects have none."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from exporter.files.inspect import inspect_model
from exporter.gradient_graph.build import build_gradient_graph
from symbolics.errors import ExportError
from symbolics.node.backward import BACKWARD_SPECS, context_of, is_backward, targets_of
from symbolics.node.containers import Slot
from symbolics.node.dialects import DIALECTS, to_dialect
from symbolics.node.names import OWN_DOMAIN, PYTHON_OP_BACKWARD
from tests.symbolics.node.node_models import call_of, model_of


def second():
    """The second order of a call with two inputs."""
    model = model_of(call_of(Slot(0), Slot(1)))
    return build_gradient_graph(build_gradient_graph(model))


def of_order(model, order):
    return [node for node in model.graph if is_backward(node) and node.attributes["order"].as_int() == order]


def test_the_schema_is_registered_and_says_what_the_table_says():
    schema = onnx.defs.get_schema(PYTHON_OP_BACKWARD, OWN_DOMAIN)
    assert schema.since_version == 1
    assert {name: (a.type.name, a.required) for name, a in schema.attributes.items()} == {
        name: (kind.name, required) for name, (kind, required, _) in BACKWARD_SPECS.items()
    }
    assert all(a.description for a in schema.attributes.values())


@pytest.mark.parametrize("name", [name for name, (_, required, _) in BACKWARD_SPECS.items() if required])
def test_the_checker_refuses_a_missing_attribute(name):
    model = second()
    onnx.checker.check_model(ir.to_proto(model))
    del of_order(model, 2)[0].attributes[name]
    with pytest.raises(onnx.checker.ValidationError, match=name):
        onnx.checker.check_model(ir.to_proto(model))


def test_types_and_ranks_are_inferred_the_contexts_too():
    model = second()
    node = of_order(model, 1)[0]
    assert context_of(node) is node.outputs[-1]
    for value in (*node.outputs, *of_order(model, 2)[0].outputs):
        value.type = value.shape = None
    inferred = onnx.shape_inference.infer_shapes(ir.to_proto(model))
    found = {v.name: v.type.tensor_type for v in (*inferred.graph.value_info, *inferred.graph.output)}
    assert found[node.outputs[-1].name].elem_type == onnx.TensorProto.INT64
    assert len(found[of_order(model, 2)[0].outputs[0].name].shape.dim) == 2


def test_inputs_say_what_the_outputs_are_gradients_of():
    model = second()
    first, last = of_order(model, 1)[0], of_order(model, 2)[0]
    assert [v.name for v in targets_of(first)] == ["x0", "x1", "y0"]
    assert [v.name for v in targets_of(last)] == ["x0", "x1", "y0", "y0_grad"]
    assert [v.name for v in last.inputs[1:3]] == ["x0_grad_grad", "x1_grad_grad"]


def test_inspect_counts_them_and_says_what_each_gives():
    model = second()
    facts = inspect_model(model)
    assert facts.gradients == 3
    (row,) = facts.rows
    assert row.error is None
    assert sorted(line.split(": ")[1] for line in row.backward) == ["x0, x1", "x0, x1", "x0, x1, y0, y0_grad"]


@pytest.mark.parametrize("attribute", [ir.AttrInt64("input_tensor_types", 1), ir.AttrString("input_tensor_types", "x"), None])
def test_inspect_reads_damaged_ones(attribute):
    model = second()
    for node in of_order(model, 2):
        del node.attributes["input_tensor_types"]
        if attribute is not None:
            node.attributes.add(attribute)
    assert inspect_model(model).gradients == 3


@pytest.mark.parametrize("schema", DIALECTS)
def test_other_dialects_cannot_say_it(schema):
    with pytest.raises(ExportError, match=rf"PythonOpBackward, which schema='{schema}' cannot say"):
        to_dialect(second(), schema)


def test_a_tensor_in_two_arguments_gets_the_sum():
    model = model_of(call_of(Slot(0), Slot(1)))
    node = model.graph[0]
    node.replace_input_with(1, node.inputs[0])
    model.graph.inputs.pop()
    third = build_gradient_graph(build_gradient_graph(build_gradient_graph(model)))
    onnx.checker.check_model(ir.to_proto(third))
    assert {len(targets_of(n)) for n in third.graph if is_backward(n)} == {3, 4, 7}


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("flags", [(True, False), (True, False, False), (False, True, False)])
def test_what_a_file_leaves_out_at_the_end_is_there_again(flags, outputs):
    """Absent values are left out where a node would end with them: each order is made of the order before as it is, and as a file has it."""
    results = tuple(Slot(i) for i in range(outputs)) if outputs > 1 else Slot(0)
    call = call_of(
        *map(Slot, range(len(flags))), outputs=results, input_requires_grads=flags, output_requires_grads=(True, False)[:outputs]
    )
    plain = read = model_of(call)
    for _ in range(3):
        read = build_gradient_graph(ir.to_proto(read))
        plain = build_gradient_graph(plain)
        assert ir.to_proto(read) == ir.to_proto(plain)
    assert of_order(read, 3)
