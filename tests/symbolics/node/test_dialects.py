"""The dialects of other readers, attribute by attribute, and what each of them cannot say."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import onnx
import onnx_ir as ir
import pytest
import torch

from symbolics.errors import ExportError, FormatError, PythonopWarning
from symbolics.node.attributes import GRAD_SPECS, SPECS, values_of
from symbolics.node.call import Autocast
from symbolics.node.containers import Slot
from symbolics.node.dialects import DIALECTS, to_dialect
from tests.symbolics.node import values as v
from tests.symbolics.node.node_models import call_of, check, model_of, node_of

X = Slot(0)
ORT_BUILDS = ["ort-1.15", "ort-1.16", "ort-1.17"]
FUNC_NAME = ["ort-1.16", "ort-1.17"]

# One argument a family of attributes: an int, a float, a tuple of each, and a str for the pointers.
FULL = call_of(X, 7, 0.5, (1, 2), (0.25, 4.0), "text", (3,), inplace=True, training=True)
FULL_VALUES = {
    "input_convention": "dcccccc",
    "input_requires_grads": [1, 0, 0, 0, 0, 0, 0],
    "input_tensor_types": [1],
    "input_tensor_ranks": [2],
    "output_tensor_types": [1],
    "output_tensor_ranks": [2],
    "training_mode": 1,
    "input_int_scalars": [7],
    "input_int_scalar_positions": [1],
    "input_float_scalars": [0.5],
    "input_float_scalar_positions": [2],
    "input_int_tuples": [1, 2, 3],
    "input_int_tuple_positions": [3, 6],
    "input_int_tuple_begins": [0, 2],
    "input_float_tuples": [0.25, 4.0],
    "input_float_tuple_positions": [4],
    "input_float_tuple_begins": [0],
    "input_pointer_scalars": [0],
    "input_pointer_scalar_positions": [5],
}
OWN = {
    "documented": {"name": "pkg.mod:Fn", "output_tensor_requires_grads": [1], "inplace": 1},
    "ort-1.15": {"name": "pkg.mod:Fn", "inplace": 1},
    "ort-1.16": {"func_name": "pkg.mod:Fn", "inplace": 1},
    "ort-1.17": {"func_name": "pkg.mod:Fn"},
}
GRAD_VALUES = {
    "output_convention": "dcccccc",
    "output_tensor_requires_grads": [1],
    "input_tensor_types": [1],
    "input_tensor_ranks": [2],
    "output_tensor_types": [1],
    "output_tensor_ranks": [2],
}
GRAD_OWN = {
    "documented": {"name": "pkg.mod:Fn", "input_tensor_requires_grads": [1], "inplace": 0},
    "ort-1.15": {"name": "pkg.mod:Fn", "inplace": 0},
    "ort-1.16": {"func_name": "pkg.mod:Fn", "inplace": 0},
    "ort-1.17": {"func_name": "pkg.mod:Fn"},
}


def quiet(model, schema):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PythonopWarning)
        return to_dialect(model, schema)


def losses(call, schema="documented"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        to_dialect(model_of(call), schema)
    assert all(w.category is PythonopWarning for w in caught)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("schema", DIALECTS)
def test_python_op(schema):
    assert values_of(node_of(quiet(model_of(FULL), schema))) == {**FULL_VALUES, **OWN[schema]}


@pytest.mark.parametrize("schema", DIALECTS)
def test_python_op_grad(schema):
    node = node_of(quiet(model_of(FULL, gradient=True), schema), "PythonOpGrad")
    assert values_of(node) == {**GRAD_VALUES, **GRAD_OWN[schema]}


def test_the_cases_above_fill_every_attribute():
    assert set(FULL_VALUES) | set(OWN["documented"]) == set(SPECS) - {"call"}
    assert set(GRAD_VALUES) | set(GRAD_OWN["documented"]) == set(GRAD_SPECS) - {"call"}


@pytest.mark.parametrize("schema", FUNC_NAME)
def test_bools_have_attributes_of_their_own(schema):
    node = node_of(quiet(model_of(call_of(True, X, 7, (True, False), (1, True), False, (True,), (5,))), schema))
    values = values_of(node)
    assert {k: v for k, v in values.items() if "bool" in k or "int_" in k} == {
        "input_bool_scalars": [1, 0],
        "input_bool_scalar_positions": [0, 5],
        "input_bool_tuples": [1, 0, 1],
        "input_bool_tuple_positions": [3, 6],
        "input_bool_tuple_begins": [0, 2],
        "input_int_scalars": [7],
        "input_int_scalar_positions": [2],
        "input_int_tuples": [1, 1, 5],
        "input_int_tuple_positions": [4, 7],
        "input_int_tuple_begins": [0, 2],
    }


@pytest.mark.parametrize("schema", ["documented", "ort-1.15"])
def test_elsewhere_bools_are_ints(schema):
    values = values_of(node_of(quiet(model_of(call_of(True, X, (True, False))), schema)))
    assert values["input_int_scalars"] == [1]
    assert values["input_int_tuples"] == [1, 0]
    assert not [name for name in values if "bool" in name]


@pytest.mark.parametrize("schema", ORT_BUILDS)
def test_gradients_of_others_get_their_types(schema):
    model = model_of(FULL, gradient=True)
    grad = node_of(model, "PythonOpGrad")
    for name in ("input_tensor_types", "input_tensor_ranks", "output_tensor_types", "output_tensor_ranks"):
        del grad.attributes[name]
    assert values_of(node_of(quiet(model, schema), "PythonOpGrad")) == {**GRAD_VALUES, **GRAD_OWN[schema]}
    grad.inputs[1].type = None
    with pytest.raises(ExportError, match="PythonOpGrad 'op_grad' lacks its tensor types"):
        quiet(model, schema)


@pytest.mark.parametrize("schema", DIALECTS)
def test_the_model_is_a_copy_and_keeps_the_rest(schema):
    model = model_of(FULL, gradient=True, marks=2)
    model.metadata_props["pythonop.stop_gradients"] = "2"
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    out = quiet(model, schema)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    proto = ir.to_proto(out)
    assert [f.name for f in proto.functions] == ["StopGradient"]
    assert sum(n.op_type == "StopGradient" for n in proto.graph.node) == 2
    assert {p.key: p.value for p in proto.metadata_props} == {"pythonop.stop_gradients": "2"}
    assert b'"version"' not in proto.SerializeToString(), "call is left somewhere"


def test_the_documented_dialect_passes_the_checker():
    check(quiet(model_of(FULL, gradient=True, marks=1), "documented"))


@pytest.mark.parametrize("schema", DIALECTS)
def test_the_context_gets_a_unique_name(schema):
    model = model_of(FULL)
    model.graph.outputs[0].name = "op_context"  # somebody has it already
    out = node_of(quiet(model, schema)).outputs[0]
    assert out.name == "op_context_1"
    assert (out.dtype, list(out.shape)) == (ir.DataType.INT64, [])
    assert node_of(quiet(model_of(FULL, context="mine"), schema)).outputs[0].name == "mine"


@pytest.mark.parametrize("schema", DIALECTS)
def test_nodes_in_subgraphs_and_functions(schema):
    def body(model):
        return ir.Function("d", "F", graph=model.graph, attributes=[])

    inner, model = model_of(FULL), model_of(FULL)
    for value in (*inner.graph.inputs, *inner.graph.outputs):
        value.name = f"inner_{value.name}"
    model.functions[("d", "F", "")] = body(inner)
    then = ir.Graph([], [], nodes=[], name="then")
    branch = model_of(FULL, context="branch_ctx").graph
    source = branch.inputs[0]
    source.replace_all_uses_with(model.graph.inputs[0])
    branch.inputs.clear()
    node_in_branch = branch[0]
    node_in_branch.outputs[1].name = "branch_y"
    then = branch
    condition = ir.Value(name="c", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    model.graph.inputs.append(condition)
    model.graph.append(
        ir.Node(
            "", "If", [condition], [ir.AttrGraph("then_branch", then), ir.AttrGraph("else_branch", model_of(FULL).graph)], num_outputs=1
        )
    )
    out = quiet(model, schema)
    found = [n for g in (out.graph, *out.functions.values()) for n in ir.traversal.RecursiveGraphIterator(g) if n.op_type == "PythonOp"]
    assert len(found) == 4
    assert not [n for n in found if "call" in n.attributes]
    assert "call" in node_in_branch.attributes
    contexts = [n.outputs[0].name for n in found]
    assert all(contexts)
    assert len(set(contexts)) == 4


@pytest.mark.parametrize("schema", ORT_BUILDS)
def test_what_a_release_cannot_load(schema):
    assert quiet(model_of(FULL), schema).ir_version == 9
    model = model_of(FULL, opset=21)
    with pytest.warns(PythonopWarning, match=f"opset 21, that release knows .*opset_version={DIALECTS[schema].max_opset}"):
        to_dialect(model, schema)
    assert quiet(model_of(FULL), "documented").ir_version == 10


# ------------------------------------------------------------------------------------------------------------- losses

LOST = {
    "None": (call_of(X, None), "argument 1: a value of type NoneType can only be written as an address"),
    "str": (call_of(X, "mean"), "argument 1: a value of type str can only be written as an address"),
    "list": (call_of(X, [1, 2]), "argument 1: a value of type list can only be written as an address"),
    "dtype": (call_of(X, 1, torch.float16), "argument 2: a value of type dtype can only be written as an address"),
    "empty tuple": (call_of(X, ()), "argument 1: a value of type tuple can only be written as an address"),
    "big int": (call_of(X, 1 << 70), "argument 1: a value of type int can only be written as an address"),
    "precision": (call_of(X, 0.1), "argument 1: 0.1 is rounded to float32"),
    "tiny": (call_of(X, 1e-300), "argument 1: 1e-300 is rounded to float32"),
    "huge": (call_of(X, 1e300), "argument 1: a value of type float can only be written as an address"),
    "tuple precision": (call_of(X, (0.5, 0.1)), "argument 1: 0.1 is rounded to float32"),
    "size": (call_of(X, Slot(1, "size")), "argument 1: a size of a dynamic dimension is handed over as an int64 tensor"),
    "kwargs": (call_of(X, kwargs={"alpha": 2}), "keyword argument 'alpha': it is handed over by position"),
    "kwargs precision": (call_of(X, kwargs={"alpha": 0.1}), "keyword argument 'alpha': 0.1 is rounded"),
    "container": (call_of([X, None, Slot(1)]), "argument 0: a value of type list that holds tensors or sizes is taken apart"),
    "dataclass": (
        call_of(v.Config(X, 1)),
        "argument 0: a value of type tests.symbolics.node.values:Config that holds tensors or sizes is taken apart",
    ),
    "named tuple": (
        call_of(X, v.Pair(1)),
        "argument 1: a value of type tests.symbolics.node.values:Pair can only be written as an address",
    ),
    "defaults": (call_of(X, 1, 2, passed=1), "arguments 1 to 2: they are defaults of forward"),
    "output": (call_of(X, outputs=(Slot(0), "mean", None)), "output 1, of type str, is no tensor and is left out"),
    "output None": (call_of(X, outputs=(Slot(0), "mean", None)), "output 2, of type NoneType, is no tensor"),
    "output dict": (call_of(X, outputs=OrderedDict(a=Slot(0))), "its output, of type OrderedDict, is taken apart"),
    "autocast": (call_of(X, autocast=Autocast({"cpu": "bfloat16"})), "autocast: it ran under autocast to bfloat16"),
}


@pytest.mark.parametrize("schema", DIALECTS)
@pytest.mark.parametrize("case", LOST)
def test_each_loss_is_said(case, schema):
    call, expected = LOST[case]
    found = [text for text in losses(call, schema) if expected in text]
    assert len(found) == 1, losses(call, schema)
    assert "pkg.mod:Fn" in found[0]
    assert repr(schema) in found[0]
    assert "saved without schema=" in found[0]


@pytest.mark.parametrize("schema", DIALECTS)
def test_nothing_is_said_where_nothing_is_lost(schema):
    call = call_of(X, 7, 0.5, (1, 2), (0.25, float("inf"), float("nan")), Slot(1), -0.0, outputs=(Slot(0), Slot(1)))
    assert losses(call, schema) == []


def test_bools_are_lost_only_where_there_is_no_place():
    call = call_of(X, True, (True, False))
    for schema in ("documented", "ort-1.15"):
        assert len([text for text in losses(call, schema) if "a bool is written as the int 1" in text]) == 2
    for schema in FUNC_NAME:
        assert losses(call, schema) == []
        assert any("a bool is written as" in text for text in losses(call_of(X, (1, True)), schema))


def test_inplace_is_lost_where_it_has_no_place():
    call = call_of(X, inplace=True)
    assert any("pkg.mod:Fn: inplace has no place" in text for text in losses(call, "ort-1.17"))
    assert losses(call, "ort-1.16") == []


def test_equal_losses_are_counted_not_repeated():
    model = model_of(call_of(X, 0.1))
    second = node_of(model_of(call_of(X, 0.1)))
    node = ir.Node(second.domain, second.op_type, model.graph.inputs, list(second.attributes.values()), num_outputs=2, name="op2")
    node.outputs[0].name, node.outputs[1].name = "", "z"
    model.graph.append(node)
    with pytest.warns(PythonopWarning) as caught:
        to_dialect(model, "documented")
    assert len([w for w in caught if "(2 calls)" in str(w.message)]) == 1 == len(caught)


def test_names_in_warnings_are_escaped():
    (text,) = losses(call_of(X, kwargs={"evil\x1b[31m": 1}))
    assert text.isprintable()


# ------------------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize("schema", DIALECTS)
def test_refused(schema):
    with pytest.raises(ExportError, match=r"pkg\.mod:Fn has no tensor argument"):
        to_dialect(model_of(call_of(3)), schema)
    with pytest.raises(ExportError, match=r"pkg\.mod:Fn returns no tensor"):
        to_dialect(model_of(call_of(X, outputs=None)), schema)


@pytest.mark.parametrize("schema", ["ort-2.0", "", "Documented", "evil\x1b[2J"])
def test_unknown_dialect(schema):
    with pytest.raises(ExportError, match="documented, ort-1.15, ort-1.16, ort-1.17") as caught:
        to_dialect(model_of(FULL), schema)
    assert str(caught.value).isprintable()


def test_a_damaged_node_is_refused():
    model = model_of(FULL)
    del node_of(model).attributes["input_convention"]
    with pytest.raises(FormatError, match="lacks the attribute input_convention"):
        to_dialect(model, "documented")


def test_a_written_dialect_is_a_file(tmp_path):
    out = quiet(model_of(FULL, gradient=True), "ort-1.17")
    ir.save(out, tmp_path / "m.onnx")
    onnx.load(tmp_path / "m.onnx")
