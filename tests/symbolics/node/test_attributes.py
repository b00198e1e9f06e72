"""AutogradCall <-> attributes of both operators."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings, strategies as st

from symbolics.errors import ExportError, FormatError
from symbolics.node.arguments import Unresolved
from symbolics.node.attributes import (
    GRAD_SPECS,
    SPECS,
    check_types,
    ir_attributes,
    python_op_grad,
    read_attributes,
    values_of,
    with_gradient,
    write_attributes,
    wrong_tensors,
)
from symbolics.node.call import Autocast, AutogradCall, OperatorOrigin
from symbolics.node.containers import Slot, fill, slots
from symbolics.node.limits import MAX_BYTES, MAX_DEPTH, MAX_INT_BITS, MAX_ITEMS
from symbolics.node.names import ORT_DOMAIN
from tests.symbolics.node import values as v
from tests.symbolics.node.exact import same
from tests.symbolics.node.node_models import call_of, check, model_of, node_of

X = Slot(0)


def through_file(call, names=lambda _: None):
    """Encode, write as protobuf, read, decode."""
    node = ir.Node(ORT_DOMAIN, "PythonOp", [], ir_attributes(write_attributes(call, names)), num_outputs=1)
    proto = onnx.NodeProto.FromString(ir.to_proto(node).SerializeToString())
    return read_attributes(values_of(ir.from_proto(proto)), v.resolver)


def same_call(a, b):
    return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(AutogradCall))


# -------------------------------------------------------------------------------------------------------- round trips


def _numbered(parts):
    """Slots of hypothesis's holes, counted as a file counts them."""
    count = iter(range(1 << 20))
    return fill(parts, lambda leaf: Slot(next(count), "size" if leaf.index == -2 else "tensor") if isinstance(leaf, Slot) else leaf)


@st.composite
def calls(draw):
    args = draw(st.lists(v.holes, max_size=4))
    kwargs = draw(st.dictionaries(st.text("abcxyz_é", min_size=1, max_size=4), v.holes, max_size=2))
    args, kwargs = _numbered([args, dict(sorted(kwargs.items()))])
    outputs = _numbered(fill(draw(v.holes), lambda leaf: Slot(-1) if isinstance(leaf, Slot) else leaf))
    n, m = len(slots([args, kwargs])), len(slots(outputs))

    def many(count, items):
        return tuple(draw(st.lists(items, min_size=count, max_size=count)))

    types, ranks, flags = st.sampled_from([1, 7, 10, 11, 16]), st.integers(0, 5), st.booleans()
    passed = draw(st.none() | st.integers(0, max(len(args) - 1, 0))) if args else None
    operator = draw(st.none() | st.builds(OperatorOrigin, st.text(max_size=3), st.text(max_size=3)))
    return AutogradCall(
        id=draw(st.text(max_size=3)), name="pkg.mod:Outer.Fn" if operator is None else "pkg::op.default", operator=operator, args=tuple(args), kwargs=kwargs, outputs=outputs,
        input_types=many(n, types), input_ranks=many(n, ranks), input_requires_grads=many(n, flags),
        output_types=many(m, types), output_ranks=many(m, ranks), output_requires_grads=many(m, flags),
        inplace=draw(flags), training=draw(flags), passed=passed,
        autocast=draw(st.just(Autocast()) | st.builds(Autocast, st.dictionaries(st.sampled_from(["cpu", "cuda"]), st.sampled_from(["float16", "bfloat16"]), min_size=1), flags)),
    )  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(calls())
def test_round_trip(call):
    found = through_file(call)
    assert found == call
    assert same_call(replace(found, autocast=call.autocast), call), "equal for __eq__, but not the same"
    assert found.autocast.cache is call.autocast.cache
    assert found.autocast.dtypes == call.autocast.dtypes


@settings(max_examples=100, deadline=None)
@given(calls())
def test_without_a_resolver_everything_can_be_read(call):
    found = read_attributes(write_attributes(call))
    assert (found.name, found.convention, found.input_types) == (call.name, call.convention, call.input_types)


def test_equality_counts_types():
    assert call_of(1) != call_of(True) != call_of(1.0)
    assert call_of(0.0) != call_of(-0.0)
    assert call_of(float("nan")) == call_of(float("nan"))
    assert call_of(1) != "call"
    assert hash(call_of(1)) == hash(call_of(1))
    thing, other = object(), object()
    assert call_of(thing) == call_of(thing) != call_of(other)


# --------------------------------------------------------------------------------------------------- every attribute

#: attribute -> (call, value): one case fills it, and the value is checked.
CASES = {
    "name": (call_of(X), "pkg.mod:Fn"),
    "input_convention": (call_of(1, X, [Slot(1), None], Slot(2, "size"), kwargs={"b": 1}), "cddcdc"),
    "input_requires_grads": (call_of(1, X, Slot(1), input_requires_grads=(True, False)), [0, 1, 0]),
    "input_tensor_types": (call_of(X, Slot(1), input_types=(10, 7)), [10, 7]),
    "input_tensor_ranks": (call_of(X, Slot(1), input_ranks=(0, 4)), [0, 4]),
    "output_tensor_types": (call_of(X, outputs=(Slot(0), Slot(1)), output_types=(16, 9)), [16, 9]),
    "output_tensor_ranks": (call_of(X, outputs=(Slot(0), Slot(1)), output_ranks=(3, 0)), [3, 0]),
    "output_tensor_requires_grads": (call_of(X, outputs=(Slot(0), Slot(1)), output_requires_grads=(True, False)), [1, 0]),
    "inplace": (call_of(X, inplace=True), 1),
    "training_mode": (call_of(X, training=True), 1),
    "input_int_scalars": (call_of(X, 7, True, -(2**63), 2**63 - 1), [7, 1, -(2**63), 2**63 - 1]),
    "input_int_scalar_positions": (call_of(7, X, 8), [0, 2]),
    "input_float_scalars": (call_of(X, 0.5, float("inf"), 3.4028234663852886e38), [0.5, float("inf"), 3.4028234663852886e38]),
    "input_float_scalar_positions": (call_of(0.5, X, 0.1), [0, 2]),
    "input_int_tuples": (call_of((1, 2), X, (True,), (3, False)), [1, 2, 1, 3, 0]),
    "input_int_tuple_positions": (call_of((1, 2), X, (3,)), [0, 2]),
    "input_int_tuple_begins": (call_of((1, 2), X, (3,), (4, 5)), [0, 2, 3]),
    "input_float_tuples": (call_of((1.0, 2.5), X, (0.25,)), [1.0, 2.5, 0.25]),
    "input_float_tuple_positions": (call_of((1.0,), X, (0.25,)), [0, 2]),
    "input_float_tuple_begins": (call_of((1.0, 2.0, 3.0), X, (0.25,)), [0, 3]),
    "input_pointer_scalars": (call_of(X, None, "a", [1], 2**64, 3.41e38, (1, 2.0), (), torch.float16, torch.Size([1])), [0] * 9),
    "input_pointer_scalar_positions": (call_of(None, X, 1, "a"), [0, 3]),
    "call": (call_of(X), '{"version":1,"id":"0","args":[{"$tensor":0}],"kwargs":{},"outputs":{"$tensor":0}}'),
}
GRAD_CASES = {
    "name": (call_of(X), "pkg.mod:Fn"),
    "output_convention": (call_of(1, X, None), "cdc"),
    "input_tensor_requires_grads": (call_of(X, outputs=(Slot(0), Slot(1)), output_requires_grads=(False, True)), [0, 1]),
    "output_tensor_requires_grads": (call_of(X, 1, Slot(1), input_requires_grads=(False, True)), [0, 1]),
    "input_tensor_types": (call_of(X, outputs=(Slot(0), Slot(1)), output_types=(10, 1)), [10, 1]),
    "input_tensor_ranks": (call_of(X, outputs=(Slot(0), Slot(1)), output_ranks=(0, 3)), [0, 3]),
    "output_tensor_types": (call_of(X, Slot(1), input_types=(1, 11)), [1, 11]),
    "output_tensor_ranks": (call_of(X, Slot(1), input_ranks=(3, 0)), [3, 0]),
    "inplace": (call_of(X, inplace=True), 0),
    "call": (call_of(X), '{"version":1,"id":"0","args":[{"$tensor":0}],"kwargs":{},"outputs":{"$tensor":0}}'),
}


def _values(model, op_type):
    return values_of(node_of(ir.from_proto(onnx.ModelProto.FromString(check(model).SerializeToString())), op_type))


@pytest.mark.parametrize("attribute", SPECS)
def test_attribute(attribute):
    call, expected = CASES[attribute]
    found = _values(model_of(call), "PythonOp")[attribute]
    if SPECS[attribute][0] is ir.AttributeType.FLOATS:
        expected = np.float32(expected).tolist()
    assert same(found, expected)
    assert through_file(call) == call


@pytest.mark.parametrize("attribute", GRAD_SPECS)
def test_attribute_of_the_gradient(attribute):
    call, expected = GRAD_CASES[attribute]
    assert same(_values(model_of(call, gradient=True), "PythonOpGrad")[attribute], expected)


def test_lists_may_be_empty():
    values = _values(model_of(call_of(3, outputs=None), context="c"), "PythonOp")
    assert values["input_tensor_types"] == [] == values["output_tensor_requires_grads"]
    assert through_file(call_of(outputs=())) == call_of(outputs=())


def test_attributes_are_written_in_one_order():
    order = list(SPECS)
    call = call_of(X, 1, 0.5, (1,), (0.5,), None)
    assert list(write_attributes(call)) == [name for name in order if name in write_attributes(call)]
    assert set(write_attributes(call)) == set(SPECS)


def test_optional_keys_of_call():
    data = json.loads(write_attributes(call_of(X, 1, passed=1, autocast=Autocast({"cuda": "float16", "cpu": "bfloat16"}, False)))["call"])
    assert data["passed"] == 1
    assert data["autocast"] == {"dtypes": {"cpu": "bfloat16", "cuda": "float16"}, "cache": False}
    assert "passed" not in json.loads(write_attributes(call_of(X, 1, passed=2))["call"])
    call = call_of(X, Slot(1), Slot(2), no_gradient=(0, 2), no_gradient_seen=(1,))
    data = json.loads(write_attributes(call)["call"])
    assert (data["no_gradient"], data["no_gradient_seen"]) == ([0, 2], [1])
    assert through_file(call) == call != through_file(call_of(X, Slot(1), Slot(2)))


# ------------------------------------------------------------------------------------------------------- PythonOpGrad


def test_python_op_grad():
    call = call_of(
        X, Slot(1), 3, Slot(2), outputs=(Slot(0), Slot(1)), input_requires_grads=(True, False, True), output_requires_grads=(True, False)
    )
    model = model_of(call, gradient=True)
    node, grad = node_of(model), node_of(model, "PythonOpGrad")
    assert [value.name for value in grad.inputs] == ["ctx", "y0_grad", "y1_grad", "y0", "y1"]
    assert [value.name for value in grad.outputs] == ["x0_grad", "", "x2_grad"]
    other = python_op_grad(node, node.outputs[0], [None, model.graph.inputs[-1]], wanted=[False, True, True])
    assert other.inputs[1] is None
    assert values_of(other)["output_tensor_requires_grads"] == [0, 0, 1]
    with pytest.raises(FormatError, match="2 tensor outputs, gradients= has 1"):
        python_op_grad(node, node.outputs[0], [None])
    with pytest.raises(FormatError, match="3 tensor inputs, wanted= has 1"):
        python_op_grad(node, node.outputs[0], [None, None], wanted=[True])


# ----------------------------------------------------------------------------------------------- refused on writing


def test_limits_on_writing():
    deep = 0
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    for value, text in [
        (deep, "nests deeper"),
        ("x" * MAX_BYTES, f"a file may hold {MAX_BYTES}"),
        ([0] * (MAX_ITEMS + 1), f"more than {MAX_ITEMS} values"),
        (1 << MAX_INT_BITS, f"{MAX_INT_BITS} that a file may hold"),
        (object(), "exporter.register"),
    ]:
        with pytest.raises(ExportError, match=rf"pkg\.mod:Fn.*{text}"):
            write_attributes(call_of(X, value))
        with pytest.raises(ExportError, match=rf"pkg\.mod:Fn.*{text}"):
            write_attributes(call_of(X, kwargs={"k": value}))


def test_errors_on_writing_name_the_argument():
    with pytest.raises(ExportError, match="argument 1:"):
        write_attributes(call_of(X, object()))
    with pytest.raises(ExportError, match="keyword argument 'k':"):
        write_attributes(call_of(X, kwargs={"k": object()}))
    with pytest.raises(ExportError, match="output"):
        write_attributes(call_of(X, outputs=(Slot(0), object())))


def test_a_keyword_that_json_would_change_is_refused():
    with pytest.raises(ExportError, match="keyword"):
        write_attributes(call_of(X, kwargs={"\ud83d\ude00": 1}))


def test_registered_objects():
    thing = torch.Generator()
    call = call_of(X, thing)
    values = write_attributes(call, lambda x: "gen" if x is thing else None)
    assert read_attributes(values, lambda kind, name: {("object", "gen"): thing}[kind, name]).args[1] is thing
    assert read_attributes(values).args[1] == Unresolved("object gen")


@pytest.mark.parametrize(
    ("fields", "wanted", "expected"),
    [
        ({}, None, [1, 1, 1]),
        ({"no_gradient": (1,)}, None, [1, 0, 1]),
        ({"no_gradient": (0, 1, 2)}, None, [0, 0, 0]),
        ({"no_gradient_seen": (1,)}, [True, True, False], [1, 0, 0]),
        ({"no_gradient_seen": (1,)}, [False, True, False], [0, 1, 0]),  # nothing else would run the backward
        ({"no_gradient": (0,), "no_gradient_seen": (1, 2)}, None, [0, 1, 1]),
        ({"no_gradient": (0,), "no_gradient_seen": (1,)}, None, [0, 0, 1]),
    ],
)
def test_where_backward_gives_none(fields, wanted, expected):
    node = node_of(model_of(call_of(X, Slot(1), Slot(2), **fields)))
    assert with_gradient(node, wanted) == [bool(flag) for flag in expected]
    grad = python_op_grad(node, node.outputs[0], [None], with_gradient(node, wanted))
    assert values_of(grad)["output_tensor_requires_grads"] == expected
    assert [value.name != "" for value in grad.outputs] == [bool(flag) for flag in expected]
    assert with_gradient(node, wanted, lambda _: True) == ([True] * 3 if wanted is None else wanted)
    if wanted is None:
        assert values_of(python_op_grad(node, node.outputs[0], [None]))["output_tensor_requires_grads"] == expected


# ----------------------------------------------------------------------------------------------- refused on reading

GOOD = write_attributes(call_of(X, 0.1, {"a": (1, None)}, kwargs={"k": 2}))


def _with(**changes):
    return {**GOOD, **changes}


def _call(**changes):
    return _with(call=json.dumps({**json.loads(GOOD["call"]), **changes}))


@pytest.mark.parametrize("attribute", [name for name, (_, required, _) in SPECS.items() if required])
def test_reading_needs_the_required_attributes(attribute):
    with pytest.raises(FormatError, match=f"lacks the attribute {attribute}"):
        read_attributes({name: value for name, value in GOOD.items() if name != attribute})


@pytest.mark.parametrize("attribute", GOOD)
@pytest.mark.parametrize("value", [None, {}, b"x", ["a"], [[1]], 0.5, object()])
def test_reading_checks_types(attribute, value):
    with pytest.raises(FormatError, match=attribute):
        read_attributes(_with(**{attribute: value}))


@pytest.mark.parametrize(
    "values",
    [
        _with(input_convention="dcc"), _with(input_convention="dccx"), _with(input_convention="cccd"), _with(input_requires_grads=[1, 0]), _with(input_requires_grads=[2, 0, 0, 0]),
        _with(output_tensor_requires_grads=[3]), _with(input_tensor_types=[1, 1]), _with(input_tensor_ranks=[]), _with(output_tensor_types=[]), _with(output_tensor_ranks=[1, 2]),
        _with(call="{"), _with(call="[]"), _with(call="{}"), _with(call="null"), _call(version=0), _call(version="1"), _call(version=True), _call(version=1.0), _call(id=1), _call(args={}),
        _call(kwargs=[]), _call(more=1), _call(autocast=[]), _call(autocast={"dtypes": {"cpu": 1}, "cache": True}), _call(autocast={"dtypes": {}}), _call(autocast={"dtypes": {}, "cache": 1}),
        _call(passed=-1), _call(passed=9), _call(passed=True), _call(passed="1"), _call(args=[{"$tensor": 1}, 1, 2]), _call(args=[{"$tensor": 0}, {"$tensor": 0}, 2]), _call(args=[1, 2, 3]),
        _call(args=[{"$what": 0}, 1, 2]), _call(outputs={"$tensor": 1}), _call(outputs={"$size": 0}), _call(outputs=None), _call(outputs={"$tuple": [{"$tensor": 0}, {"$tensor": 0}]}),
        _call(args=[{"$tensor": -1}, 1, 2]),
        *(_call(**{key: value}) for key in ("no_gradient", "no_gradient_seen") for value in (1, None, {}, [-1], [True], ["0"], [0.0], [1], [0, 0], [2**40])),
        {**_call(no_gradient=[0]), "input_requires_grads": [0, 0, 0, 0]},
    ],
)  # fmt: skip
def test_contradictions_and_damage(values):
    with pytest.raises(FormatError, match=r"pkg\.mod:Fn|a call|PythonOp"):
        read_attributes(values)


@pytest.mark.parametrize("attribute", [name for name in SPECS if name.endswith(("_types", "_ranks", "requires_grads"))])
@pytest.mark.parametrize("value", [-1, 1 << 31, 1 << 62, 65])
def test_numbers_beyond_the_limits_are_refused(attribute, value):
    """Ranks that no tensor has, element types that ONNX has not, flags that are none."""
    for read in (
        read_attributes,
        lambda values: check_types(values, SPECS, "PythonOp"),
        lambda values: check_types(values, SPECS, "PythonOp", complete=False),
    ):
        with pytest.raises(FormatError, match=f"the attribute {attribute} of a PythonOp: it holds"):
            read(_with(**{attribute: [value]}))


def test_the_element_types_are_onnxs():
    kinds = set(onnx.TensorProto.DataType.values()) - {0}
    assert all(wrong_tensors([kind], [0, 64]) is None for kind in kinds)
    assert all(wrong_tensors([kind], []) is not None for kind in (0, -1, max(kinds) + 1, 1 << 40))
    assert wrong_tensors([], [65]) is not None
    assert wrong_tensors([], [-1]) is not None


def test_long_lists_are_refused():
    with pytest.raises(FormatError, match=f"input_int_scalars of a PythonOp: it holds {MAX_ITEMS + 1} numbers, more than the {MAX_ITEMS}"):
        read_attributes(_with(input_int_scalars=[0] * (MAX_ITEMS + 1)))


def test_tuples_that_overlap_are_refused():
    """64 KiB of numbers could be laid out as 4 GiB of tuples."""
    base = {name: value for name, value in GOOD.items() if name != "call" and "scalar" not in name}
    count = 20_000
    base |= {"input_convention": "c" * count, "input_requires_grads": [0] * count, "input_tensor_types": [], "input_tensor_ranks": []}
    base |= {"input_int_tuples": [0] * count, "input_int_tuple_positions": list(range(count))}
    for begins in ([0, count] * (count // 2), [-1] * count, [0, 0, count + 1], [5, 3]):
        with pytest.raises(FormatError, match="input_int_tuple_begins of a PythonOp: it does not go through its items"):
            read_attributes({**base, "input_int_tuple_begins": begins})
    assert read_attributes({**base, "input_int_tuple_begins": list(range(count))}).args == ((0,),) * count


def _node(**changes):
    node = node_of(model_of(call_of(X)))
    for attribute in ir_attributes({**values_of(node), **changes}):
        node.attributes[attribute.name] = attribute
    return node


@pytest.mark.parametrize(
    "changes",
    [
        {"input_convention": "dd"}, {"input_convention": "x"}, {"input_requires_grads": [1, 0]}, {"input_requires_grads": []}, {"input_requires_grads": [7]},
        {"input_tensor_types": []}, {"input_tensor_types": [1, 1]}, {"input_tensor_types": [99]}, {"input_tensor_ranks": [1 << 40]}, {"output_tensor_ranks": [-1]},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_node_has_no_python_op_grad(changes):
    node = _node(**changes)
    with pytest.raises(FormatError, match="PythonOp|Fn"):
        python_op_grad(node, node.outputs[0], [None])


@pytest.mark.parametrize(
    "changes",
    [
        {"output_tensor_ranks": [1 << 31]},
        {"output_tensor_ranks": [-5]},
        {"output_tensor_types": [999]},
        {"output_tensor_types": [-(1 << 62)]},
    ],
)
def test_inference_of_a_damaged_node_is_none(changes):
    """It ends at once, and raises nothing: who reads the node says what is wrong with it."""
    model = model_of(call_of(X))
    node = node_of(model)
    for attribute in ir_attributes({**values_of(node), **changes}):
        node.attributes[attribute.name] = attribute
    name = node.outputs[1].name
    model.graph.outputs.clear()
    for value in node.outputs:
        value.type = value.shape = None
    for strict in (False, True):
        proto = onnx.shape_inference.infer_shapes(ir.to_proto(model), strict_mode=strict)
        assert not [v for v in proto.graph.value_info if v.name == name]


def test_a_newer_version_is_refused_by_name():
    with pytest.raises(FormatError, match=r"pkg\.mod:Fn: its call has format 2, this release reads up to 1: install a newer pythonop"):
        read_attributes(_call(version=2, new_key=1))


def test_names_from_files_are_escaped():
    with pytest.raises(FormatError) as caught:
        read_attributes(_with(name="evil\x1b[31m\u202e\n" + "x" * 5000, call="{}"))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(GOOD)),
    st.one_of(st.integers(), st.text(max_size=5), st.lists(st.integers(-3, 3), max_size=5), st.lists(st.floats(), max_size=3)),
)
def test_any_attribute_is_read_or_refused(name, value):
    try:
        read_attributes(_with(**{name: value}))
    except FormatError:
        pass


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["version", "id", "args", "kwargs", "outputs", "autocast", "passed", "operator", "no_gradient", "no_gradient_seen", "x"]), st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.text(max_size=3),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.sampled_from(["$tensor", "$tuple", "dtypes", "cache", "cpu", "schema", "module", "a"]), c, max_size=2), max_leaves=6)))  # fmt: skip
def test_any_call_is_read_or_refused(changes):
    try:
        read_attributes(_call(**changes))
    except FormatError:
        pass


# ---------------------------------------------------------------------------------------------------- without `call`


def test_documented_nodes_can_be_read_back():
    call = call_of(7, X, 0.5, (1, 2), (0.25,), (3,), Slot(1))
    values = {name: value for name, value in write_attributes(call).items() if name != "call"}
    found = read_attributes(values)
    assert found.args == call.args
    assert found.id == ""
    with pytest.raises(FormatError, match="no call attribute"):
        read_attributes({name: value for name, value in write_attributes(call_of(X, None)).items() if name != "call"})


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([n for n in SPECS if n.startswith("input_") and SPECS[n][0] is ir.AttributeType.INTS]),
        st.lists(st.integers(-3, 5), max_size=4),
    ),
    st.text("dc", max_size=5),
)
def test_any_documented_node_is_read_or_refused(changes, convention):
    base = {name: value for name, value in GOOD.items() if name != "call" and "scalar" not in name}
    try:
        read_attributes({**base, **changes, "input_convention": convention, "input_requires_grads": [0] * len(convention)})
    except FormatError:
        pass


def test_outputs_keep_their_containers():
    outputs = OrderedDict(a=[Slot(0), None], b=(Slot(1), {"c": "text"}))
    assert same(through_file(call_of(X, outputs=outputs)).outputs, outputs)
