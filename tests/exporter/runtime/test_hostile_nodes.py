"""Nodes that contradict their attributes, or hold attributes that no exporter writes: refused when the session is made.

Through a plain onnxruntime.InferenceSession they reach the native library as they are, so each goes both ways.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from exporter.runtime.link import LINKED
from exporter.runtime.prepare import ABSENT_INPUTS, KEPT_OUTPUTS, prepare
from exporter.runtime.session import inference_session, session_options
from exporter.runtime.store import ContextStore
from symbolics.errors import FormatError, PythonopError, RunError
from symbolics.node.attributes import write_attributes
from tests.exporter.runtime.build import forward, python_op, record, training, value, with_id
from tests.exporter.runtime.test_session import backward_only
from tests.zoo import functions as F, hostile

ALLOW = ["tests.zoo.*"]
X = torch.ones(2, 4, requires_grad=True)
ONES = np.ones((2, 4), np.float32)


@pytest.fixture(autouse=True)
def _calm():
    onnxruntime.set_default_logger_severity(4)
    yield
    onnxruntime.set_default_logger_severity(2)
    hostile.Turns.how = ""


def _pair(cls=F.SavesInput, *args):
    model = training(record(cls, X, *args))
    prepare(model)
    return model


def _set(node, name, attribute):
    kept = [one for one in node.attribute if one.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, attribute if isinstance(attribute, onnx.AttributeProto) else onnx.helper.make_attribute(name, attribute)])


def _ints(name, ints):
    return onnx.AttributeProto(name=name, type=onnx.AttributeProto.INTS, ints=ints)


def _declare(model, *names):
    model.graph.value_info.extend(onnx.helper.make_tensor_value_info(name, 1, None) for name in names)


def _read(model, name):
    """Let an operator of onnxruntime read a value: one that nothing wrote is not there."""
    model.graph.node.append(onnx.helper.make_node("Neg", [name], [f"{name}_read"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info(f"{name}_read", 1, None))


def _assert_refused(model, match, error=FormatError):
    with pytest.raises(error, match=match) as caught:
        _run(inference_session(model, ALLOW))
    assert "op0" in str(caught.value)
    with pytest.raises(Exception, match=rf"{error.__name__}: (.|\n)*{match}"):
        _run(onnxruntime.InferenceSession(model.SerializeToString(), session_options(ALLOW)))


def _run(session):
    return session.run(None, {one.name: ONES for one in session.get_inputs()})


# ------------------------------------------------------------------------------------------------- what a runtime writes


@pytest.mark.parametrize("places", [[1, 0], [0, 0], [-1], [2], [1 << 62], [-(1 << 63)], [0] * 1_000_000], ids=lambda p: str(p)[:12])
def test_kept_outputs_that_prepare_does_not_write(places):
    model = _pair(F.TwoInputs, X, 0.5)
    _set(model.graph.node[1], KEPT_OUTPUTS, _ints(KEPT_OUTPUTS, places))
    _assert_refused(model, "pythonop_kept_outputs")


def test_fewer_kept_outputs_than_outputs():
    model = _pair(F.TwoInputs, X, 0.5)
    _set(model.graph.node[1], KEPT_OUTPUTS, _ints(KEPT_OUTPUTS, [1]))
    _assert_refused(model, "it has 2 outputs in the graph, 1 by its attributes")


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("places", [[-1], [7], [0, 0], [1, 0], [1 << 62], [0] * 1_000_000], ids=lambda p: str(p)[:12])
def test_absent_inputs_that_prepare_does_not_write(places, which):
    model = _pair(F.TwoInputs, X, 0.5)
    _set(model.graph.node[which], ABSENT_INPUTS, _ints(ABSENT_INPUTS, places))
    _assert_refused(model, "pythonop_absent_inputs")


def test_absent_inputs_that_are_there():
    model = _pair(F.TwoInputs, X, 0.5)
    _set(model.graph.node[0], ABSENT_INPUTS, _ints(ABSENT_INPUTS, [1]))
    _assert_refused(model, "the graph gives it 2 tensors, its attributes say 1")


def _linked(**changes):
    attributes = write_attributes(record(F.SavesInput, X))
    return {"node": "op0", "attributes": {**attributes, **changes.pop("attributes", {})}, "places": [0], **changes}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "\n" * 10_000,
        "[" * 100_000,
        "[]",
        '{"node": "op0"}',
        '{"node": "op0", "attributes": [], "places": []}',
        '{"node": "' + "x" * (1 << 21) + '"}',
        b"\xff\xfe",
    ],
    ids=lambda text: repr(text)[:12],
)
def test_linked_calls_that_are_no_text_of_ours(text, which):
    model = _pair()
    _set(model.graph.node[which], LINKED, text)
    _assert_refused(model, "calls that it stands for|not UTF-8")


@pytest.mark.parametrize(
    "changes",
    [
        {"places": []},
        {"places": [0, 0]},
        {"places": [1]},
        {"places": [-1]},
        {"places": [10**9]},
        {"places": [True]},
        {"places": ["0"]},
        {"attributes": {"output_tensor_types": [11]}},
        {"attributes": {"output_tensor_types": [99]}},
        {"attributes": {"output_tensor_types": [1, 1]}},
        {"attributes": {"input_requires_grads": [1.0]}},
        {"attributes": {"name": ["x"]}},
        {"attributes": {}, "node": 5},
    ],
    ids=str,
)
def test_linked_calls_that_do_not_fit(changes):
    model = _pair()
    _set(model.graph.node[0], LINKED, json.dumps(_linked(**changes)))
    _assert_refused(model, "damaged")


def test_linked_calls_with_more_outputs_than_the_node():
    model = _pair()
    two = {**_linked(), "attributes": write_attributes(record(F.OddOutputs, X))}
    _set(model.graph.node[0], LINKED, json.dumps(two))
    _assert_refused(model, "outputs are not those of the last call|not joined")


def test_linked_calls_of_a_node_with_more_than_tensors():
    model = _pair(F.TwoInputs, X, 0.5)
    _set(model.graph.node[0], LINKED, json.dumps(_linked()))
    _assert_refused(model, "takes more than their tensors")


def test_linked_calls_import_nothing_that_is_not_allowed():
    model = _pair()
    _set(model.graph.node[0], LINKED, json.dumps(_linked(attributes={"name": "antigravity:geohash"})))
    with pytest.raises(PythonopError, match=r"where a subclass of torch\.autograd\.Function should be"):
        inference_session(model, ALLOW)
    assert "antigravity" not in sys.modules


# ------------------------------------------------------------------------------------------ nodes beside their attributes


@pytest.mark.parametrize("count", [0, 2, 40])
def test_another_number_of_inputs(count):
    model = forward(record(F.SavesInput, X))
    del model.graph.node[0].input[:]
    model.graph.node[0].input.extend(["x0"] * count)
    _assert_refused(model, f"the graph gives it {count} tensors, its attributes say 1")


def test_more_inputs_than_a_gradient_has():
    model = _pair()
    grad = model.graph.node[1]
    grad.input.extend(["g0"] * 300)
    with pytest.raises(Exception, match=r"FormatError(.|\n)*op0_grad(.|\n)*it has 302 inputs in the graph"):
        onnxruntime.InferenceSession(model.SerializeToString(), session_options(ALLOW))
    _run(inference_session(model, ALLOW))  # which takes them away: they order nodes at most


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("more", [1, 300])
def test_more_outputs_than_the_attributes_say(which, more):
    model = _pair()
    names = [f"more{i}" for i in range(more)]
    model.graph.node[which].output.extend(names)
    _declare(model, *names)
    _read(model, names[-1])
    _assert_refused(model, rf"it has {1 + more + (which == 0)} outputs in the graph")


def test_a_gradient_that_is_not_wanted_and_has_a_name():
    model = _pair(F.TwoInputs, X, 0.5)
    _set(model.graph.node[1], "output_tensor_requires_grads", [1, 0])
    _read(model, model.graph.node[1].output[1])
    _assert_refused(model, "its output 1 has a name")


def test_nodes_without_outputs():
    model = _pair()
    del model.graph.node[1].output[:], model.graph.output[1:]
    for session in (inference_session(model, ALLOW), _plain(model)):
        np.testing.assert_allclose(_run(session)[0], np.sin(ONES), rtol=1e-6)
    model = _pair()
    del model.graph.node[1], model.graph.node[0].output[:], model.graph.output[:], model.graph.value_info[:]
    model.graph.node[0].output.append("")  # none at all is refused by onnxruntime
    _read(model, "x0")
    for session in (inference_session(model, ALLOW), _plain(model)):
        np.testing.assert_array_equal(_run(session)[0], -ONES)


def _plain(model, **options):
    return onnxruntime.InferenceSession(model.SerializeToString(), session_options(ALLOW, **options))


def test_a_gradient_with_its_context_alone():
    model = _pair()
    del model.graph.node[1].input[1:]
    for session in (inference_session(model, ALLOW), _plain(model)):
        np.testing.assert_array_equal(_run(session)[1], 0 * ONES)


# ------------------------------------------------------------------------------------------------------------ attributes


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("inplace", [1, 2]),
        ("training_mode", "x"),
        ("call", [1]),
        ("call", 1),
        ("name", 3),
        ("name", b"\xff\xfe"),
        ("input_convention", [1]),
        ("output_tensor_types", 1),
        ("output_tensor_types", 1.5),
        ("output_tensor_types", [1.5]),
        ("output_tensor_types", "x"),
        ("input_requires_grads", [-1]),
        ("input_requires_grads", [2]),
        ("input_requires_grads", [1] * 1_000_000),
        ("output_tensor_requires_grads", [-1]),
        (ABSENT_INPUTS, "x"),
        (ABSENT_INPUTS, 1),
        (LINKED, [1]),
        *(("output_tensor_types", [kind]) for kind in (0, *range(21, 31), -1, 1 << 40, -(1 << 63))),
        *(("input_tensor_types", [kind]) for kind in (0, *range(21, 31), -1)),
    ],
    ids=lambda one: repr(one)[:16],
)
def test_attributes_of_a_node(name, given):
    model = _pair()
    _set(model.graph.node[0], name, given)
    _assert_refused(model, "damaged|has no torch dtype")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("input_tensor_requires_grads", [-1]),
        ("output_tensor_requires_grads", [-1]),
        ("output_tensor_requires_grads", [1] * 1_000_000),
        ("output_tensor_types", [1 << 40]),
        ("output_tensor_types", "x"),
        ("output_tensor_types", [1.5]),
        (KEPT_OUTPUTS, "x"),
        (KEPT_OUTPUTS, 1),
        *(("output_tensor_types", [kind]) for kind in (0, *range(21, 31), -1)),
    ],
    ids=lambda one: repr(one)[:16],
)
def test_attributes_of_a_gradient(name, given):
    model = _pair()
    _set(model.graph.node[1], name, given)
    _assert_refused(model, "damaged|has no torch dtype")


@pytest.mark.parametrize("given", [[1], [7], [0, 1], [-1], [True], 0])
def test_no_gradient_beyond_the_inputs(given):
    model = _pair()
    for node in model.graph.node:
        call = next(one for one in node.attribute if one.name == "call")
        if node.op_type == "PythonOpGrad":
            call.s = json.dumps({**json.loads(call.s), "no_gradient_seen": given}).encode()
    _assert_refused(model, "damaged")


def test_an_output_type_that_is_another():
    model = forward(record(F.SavesInput, X))
    for kind in (8, 14, 15, 16, 17, 20):
        _set(model.graph.node[0], "output_tensor_types", [kind])
        _assert_refused(model, "output 0", RunError)


# --------------------------------------------------------------------------------------------------------------- contexts


def test_two_calls_of_one_id_never_confuse_memory():
    """Which a graph may have: a function that was inlined twice. Their contexts are told apart by handles alone."""
    wide, narrow = record(F.SavesInput, torch.ones(2, 4, requires_grad=True)), record(F.SavesInput, torch.ones(3, requires_grad=True))
    store = ContextStore()
    first = inference_session(forward(wide, context=True), ALLOW, store=store)
    _, handle = first.run(None, {"x0": ONES})
    other = inference_session(backward_only(narrow), ALLOW, store=store)
    with pytest.raises(RuntimeError, match="shape"):
        other.run(None, {"context": handle, "g0": np.ones(3, np.float32), "op0_0": np.ones(3, np.float32)})
    assert len(store) == 0


@pytest.mark.parametrize("shape", [(0,), (2,), (1, 1)])
def test_a_context_that_is_no_scalar(shape):
    model = backward_only(record(F.SavesInput, X))
    del model.graph.input[0].type.tensor_type.shape.dim[:]
    for size in shape:
        model.graph.input[0].type.tensor_type.shape.dim.add(dim_value=size)
    for session in (inference_session(model, ALLOW), _plain(model), _plain(model, device="borrow")):
        with pytest.raises(Exception, match="not one int64 handle|no context has the handle"):
            session.run(None, {"context": np.ones(shape, np.int64), "g0": ONES, "op0_0": ONES})


def test_the_gradient_of_another_call():
    one, two = record(F.SavesInput, X, id="a"), record(F.SavesInput, X, id="b")
    model = training(one)
    x0 = value("x0", 1, 2)
    del model.graph.node[0].output[0]
    model.graph.node[0].output.insert(0, "unread")
    model.graph.node.insert(0, ir.to_proto(python_op(with_id(two, 0), [x0], "op1", context=True)))
    model.graph.node[2].input[0] = "op1_context"
    with pytest.raises(RunError, match="joins the context of one call, or order, to the PythonOpGrad of another"):
        _run(inference_session(model, ALLOW))


# ----------------------------------------------------------------------------------------------- what Functions return


@pytest.mark.parametrize("device", ["cpu", "borrow"])
@pytest.mark.parametrize("context", [False, True], ids=["alone", "context"])
@pytest.mark.parametrize("how", [how for how in hostile.TURNS if how not in ("", "sparse", "empty and huge")])
def test_odd_outputs_are_errors_and_leave_nothing(how, context, device):
    if (how, device) == ("a list", "borrow"):
        return  # kernels.py takes it for a tuple
    hostile.Turns.how = ""
    model = forward(record(hostile.Turns, X), context=context)
    guarded = inference_session(model, sess_options=session_options(ALLOW, device=device))
    plain = _plain(model, device=device) if context else None
    for session, store in ((guarded, guarded.store), (plain, None)):
        if session is None:
            continue
        hostile.Turns.how = how
        with pytest.raises(Exception) as caught:  # noqa: PT011
            _run(session)
        assert not isinstance(caught.value, SystemError)
        hostile.Turns.how = ""
        _run(session)
        assert store is None or len(store) == (1 if context else 0)


@pytest.mark.parametrize("how", ["sparse", "empty and huge"])
def test_odd_outputs_that_can_be_said(how):
    hostile.Turns.how = ""
    session = inference_session(forward(record(hostile.Turns, X)), ALLOW)
    hostile.Turns.how = how
    _, found = _run(session)
    assert found.shape == ((2, 4) if how == "sparse" else (0, 1 << 29, 1 << 29))


@pytest.mark.parametrize("argument", [{"$module": 0}, [{"$module": 3}]])
def test_a_module_among_the_arguments_of_a_function(argument):
    """Only a call of a module, or of a function with modules among its arguments, has any."""
    model = forward(record(F.SavesInput, X))
    attributes = {attribute.name: attribute for attribute in model.graph.node[0].attribute}
    call = json.loads(attributes["call"].s)
    call["args"].append(argument)
    attributes["call"].s = json.dumps(call).encode()
    attributes["input_convention"].s += b"c"
    attributes["input_requires_grads"].ints.append(0)
    _assert_refused(model, "an argument is a module of the call, which has none")
