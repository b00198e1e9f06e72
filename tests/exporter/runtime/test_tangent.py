"""PythonOpTangent on onnxruntime, its device path, a plain session and onnx.reference, beside torch.autograd.forward_ad."""

from __future__ import annotations

import functools
import threading

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch.autograd import forward_ad

import exporter
from exporter.gradient_graph.tangents import build_tangent_graph
from exporter.runtime.prepare import ABSENT_INPUTS, KEPT_OUTPUTS
from symbolics.errors import FormatError, PythonopError, RunError, TrustError
from symbolics.node.attributes import ir_attributes, write_attributes
from symbolics.node.metadata import tangents_of
from symbolics.node.names import OWN_DOMAIN, PYTHON_OP, PYTHON_OP_TANGENT
from tests.end_to_end.functions import ctx_api
from tests.exporter.runtime.build import finish, record, value
from tests.zoo import forward_mode as zoo, functions

ALLOW = ["tests.zoo.forward_mode:*", "tests.zoo.functions:*", "tests.end_to_end.functions.ctx_api:ForwardMode"]


class Model(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call
        self.w = torch.nn.Parameter(torch.linspace(0.5, 1.5, 12).reshape(3, 4))

    def forward(self, x):
        return self.call(x.tanh(), self.w)


def two(x, w):
    y, z = zoo.TwoByTwo.apply(x, 3.0, w)
    return y + 1, z * y


def indices(x, w):
    y, index, rank = zoo.WithIndices.apply(x * w)
    return y * 2, index, rank * y


CALLS = {
    "saves for forward": lambda x, w: zoo.SavesForForward.apply(x, w) * 2,
    "own slope": lambda x, w: zoo.OwnSlope.apply(x * w),
    "none tangents": lambda x, w: zoo.NoneTangents.apply(x, w),
    "two by two": two,
    "dirty": lambda x, w: zoo.DirtyWithJvp.apply(x * w) + w,
    "indices": indices,
    "setup context": lambda x, w: zoo.WithSetupContext.apply(x, 3) * w + zoo.WithSetupContext.apply(w),
    "same input twice": lambda x, w: zoo.SavesForForward.apply(x, x) * w,
    "functions table": lambda x, w: ctx_api.ForwardMode.apply(x * w),
    "one after the other": lambda x, w: zoo.OwnSlope.apply(zoo.SavesForForward.apply(zoo.OwnSlope.apply(x), w)),
}


def eager(model, x, moves):
    """Outputs and their tangents (None: no tangent), by forward_ad."""
    parameters = dict(model.named_parameters())
    with forward_ad.dual_level():
        given = {k: forward_ad.make_dual(v, moves[k]) if k in moves else v for k, v in parameters.items()}
        x = forward_ad.make_dual(x, moves["x"]) if "x" in moves else x
        found = torch.func.functional_call(model, given, (x,))
        return [tuple(forward_ad.unpack_dual(y)) for y in (found if isinstance(found, tuple) else (found,))]


def directions(wrt):
    torch.manual_seed(1)
    moves = {"x": torch.randn(3, 4), "w": torch.randn(3, 4)}
    return {name: moves[name] for name in wrt}


def sessions(model):
    yield "onnxruntime", lambda feeds: exporter.inference_session(model, ALLOW).run(None, feeds)
    yield "reference", lambda feeds: exporter.reference_evaluator(model, ALLOW).run(None, feeds)
    borrowed = exporter.session_options(ALLOW, device="borrow")
    yield "device path", lambda feeds: exporter.inference_session(model, sess_options=borrowed).run(None, feeds)


@functools.cache
def exported(call, dynamo):
    torch.manual_seed(0)
    model, x = Model(call), torch.randn(3, 4)
    names = {} if dynamo else {"input_names": ["x"]}
    return model, x, exporter.export(model, (x,), dynamo=dynamo, **names)


def built(call, dynamo, wrt=("x", "w")):
    model, x, program = exported(call, dynamo)
    return model, x, build_tangent_graph(program, wrt=list(wrt))


def check(call, dynamo, wrt=("x", "w")):
    model, x, graph = built(call, dynamo, wrt)
    moves = directions(wrt)
    expected = eager(model, x, moves)
    pairing = tangents_of(graph)
    feeds = {"x": x.numpy(), **{pairing.inputs[k]: v.numpy() for k, v in moves.items()}}
    names = [v.name for v in graph.graph.outputs]
    for where, run in sessions(graph):
        found = dict(zip(names, run(feeds)))
        for name, (y, tangent) in zip(names, expected):
            np.testing.assert_allclose(found[name], y.detach(), rtol=1e-5, atol=1e-6, err_msg=where)
            if name in pairing.outputs:
                tangent = torch.zeros_like(y) if tangent is None else tangent
                np.testing.assert_allclose(found[pairing.outputs[name]], tangent.detach(), rtol=1e-5, atol=1e-5, err_msg=where)
            else:
                assert tangent is None
    return graph


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", CALLS)
def test_tangents_are_eagers(name, dynamo):
    graph = check(CALLS[name], dynamo)
    kinds = [node.op_type for node in graph.graph]
    assert PYTHON_OP not in kinds and PYTHON_OP_TANGENT in kinds  # forward runs once


@pytest.mark.parametrize("wrt", [("x",), ("w",)])
@pytest.mark.parametrize("name", ["saves for forward", "none tangents", "two by two"])
def test_what_does_not_move_has_no_tangent(name, wrt):
    check(CALLS[name], True, wrt)


def test_a_function_without_jvp_is_differentiated_through_its_backward():
    model, x, graph = built(lambda x, w: zoo.NoJvp.apply(x, w), True)
    moves = directions(("x", "w"))
    with torch.enable_grad():  # v J' u, at a u that makes it one number per output
        rows = []
        for i in range(12):
            u = torch.zeros(12)
            u[i] = 1
            leaf = x.clone().requires_grad_()
            g = torch.autograd.grad(model(leaf), (leaf, model.w), u.reshape(3, 4))
            rows.append(sum((a * b).sum() for a, b in zip(g, (moves["x"], moves["w"]))))
    pairing = tangents_of(graph)
    feeds = {"x": x.numpy(), **{pairing.inputs[k]: v.numpy() for k, v in moves.items()}}
    for where, run in sessions(graph):
        np.testing.assert_allclose(run(feeds)[1], torch.stack(rows).reshape(3, 4), rtol=1e-5, atol=1e-6, err_msg=where)


@pytest.mark.parametrize(
    "function", ["SavesInput", "SavesOutput", "TwoInputs", "Materializes", "Dirty", "NonDifferentiable", "SetupContext"]
)
def test_functions_of_the_zoo_without_jvp(function):
    kind = getattr(functions, function)

    def call(x, w):
        found = kind.apply(*((x, w) if function == "TwoInputs" else (x * w,)))
        return found[0] if isinstance(found, tuple) else found

    model, x, graph = built(call, True)
    moves = directions(("x", "w"))
    pairing = tangents_of(graph)
    feeds = {"x": x.numpy(), **{pairing.inputs[k]: v.numpy() for k, v in moves.items()}}
    tangent = exporter.inference_session(graph, ALLOW).run([pairing.outputs[graph.graph.outputs[0].name]], feeds)[0]
    leaf = x.clone().requires_grad_()
    u = torch.randn(3, 4)
    gradients = torch.autograd.grad(model(leaf), (leaf, model.w), u)
    assert sum((g * moves[k]).sum() for g, k in zip(gradients, ("x", "w"))).item() == pytest.approx(
        (u * torch.tensor(tangent)).sum().item(), rel=1e-4
    )


@pytest.mark.parametrize(
    ("function", "why"),
    [("OnceWithoutJvp", "once_differentiable"), ("NumpyBackward", "not linear"), ("ClipsGradient", "not linear")],
)
def test_a_backward_that_gives_no_tangent_is_named(function, why):
    _, x, graph = built(lambda x, w: getattr(zoo, function).apply(x * w), True)
    feeds = {"x": x.numpy(), **{name: np.ones((3, 4), np.float32) for name in tangents_of(graph).inputs.values()}}
    for _, run in sessions(graph):
        with pytest.raises(RunError, match=rf"(?s)PythonOpTangent '.*{function}.*no jvp.*{why}.*define jvp"):
            run(feeds)


class Inside(torch.nn.Module):
    def forward(self, x):
        return zoo.OnceWithoutJvp.apply(x * 2.0)


def test_a_module_that_gives_no_tangent_is_told_another_way():
    """It has no place for a jvp, and cannot be portable."""
    graph = build_tangent_graph(exporter.export(torch.nn.Sequential(Inside()), (torch.randn(3, 4),), opaque=[Inside]))
    session = exporter.inference_session(graph, allow=[Inside])
    feeds = {value.name: np.ones(value.shape, np.float32) for value in session.get_inputs()}
    with pytest.raises(RunError, match=r"PythonOpTangent '.*Inside.*cannot be differentiated") as caught:
        session.run(None, feeds)
    assert "jvp, and leave the rest outside of opaque=" in str(caught.value) and "portable" not in str(caught.value)


def test_what_jvp_raises_comes_as_it_was():
    _, x, graph = built(lambda x, w: zoo.RaisesInJvp.apply(x * w), True)
    feeds = {"x": x.numpy(), **{name: np.ones((3, 4), np.float32) for name in tangents_of(graph).inputs.values()}}
    for _, run in sessions(graph):
        with pytest.raises(KeyError, match="no direction"):
            run(feeds)
    assert torch.autograd.forward_ad._current_level == -1


def test_a_tangent_of_another_shape_is_told():
    model, x, graph = built(CALLS["own slope"], True)
    node = next(n for n in graph.graph if n.op_type == PYTHON_OP_TANGENT)
    value = graph.graph.inputs[1]
    value.shape = None
    other = ir.Value(name="other", type=value.type)
    graph.graph.inputs.append(other)
    node.replace_input_with(1, other)
    ones = np.ones((3, 4), np.float32)
    feeds = {"x": x.numpy(), **dict.fromkeys(tangents_of(graph).inputs.values(), ones), "other": ones[:2]}
    for _, run in sessions(graph):
        with pytest.raises(
            RunError, match=r"the tangent of input 0 is torch.float32 of shape \[2, 4\], the input torch.float32 of shape \[3, 4\]"
        ):
            run(feeds)


def test_one_dual_level_serves_all_threads():
    _, x, graph = built(CALLS["saves for forward"], True)
    feeds = {"x": x.numpy(), **{name: np.ones((3, 4), np.float32) for name in tangents_of(graph).inputs.values()}}
    session = exporter.inference_session(graph, ALLOW)
    expected, failures = session.run(None, feeds), []

    def work():
        try:
            for _ in range(50):
                np.testing.assert_array_equal(session.run(None, feeds)[1], expected[1])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    with forward_ad.dual_level():  # and the caller's own
        np.testing.assert_array_equal(session.run(None, feeds)[1], expected[1])


def test_a_plain_session_of_a_saved_file(tmp_path):
    model, x, graph = built(CALLS["saves for forward"], True)
    path = tmp_path / "tangent.onnx"
    ir.save(graph, path)
    pairing = tangents_of(graph)
    moves = directions(("x", "w"))
    feeds = {"x": x.numpy(), **{pairing.inputs[k]: v.numpy() for k, v in moves.items()}}
    session = onnxruntime.InferenceSession(path, exporter.session_options(ALLOW))
    (y, tangent), *_ = eager(model, x, moves)
    np.testing.assert_allclose(session.run(None, feeds)[1], tangent.detach(), rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------- nodes that no builder writes
X = torch.ones(2, 4, requires_grad=True)
ONES = np.ones((2, 4), np.float32)


def crafted(cls=zoo.TwoByTwo, *more):
    """x0, x1, their tangents; y0, y1, their tangents: all named, as a file that runs on a plain session."""
    call = record(cls, X, *(more or (3.0, X)))
    count, results = len(call.input_types), len(call.output_types)
    inputs = [value(f"x{i}", call.input_types[i % count], 2) for i in range(2 * count)]
    outputs = [value(f"y{i}", call.output_types[i % results], 2) for i in range(2 * results)]
    node = ir.Node(OWN_DOMAIN, PYTHON_OP_TANGENT, inputs, ir_attributes(write_attributes(call)), outputs=outputs, name="op0")
    return finish(inputs, outputs, [node])


def refused(model, match, error=FormatError):
    feeds = {v.name: ONES if v.type.tensor_type.elem_type == 1 else ONES.astype(np.int64) for v in model.graph.input}
    with pytest.raises(error, match=match) as caught:
        exporter.inference_session(model, ALLOW).run(None, feeds)
    assert "PythonOpTangent 'op0'" in str(caught.value)
    with pytest.raises(Exception, match=rf"{error.__name__}: (.|\n)*{match}"):
        onnxruntime.InferenceSession(model.SerializeToString(), exporter.session_options(ALLOW)).run(None, feeds)
    with pytest.raises(error if error is RunError else PythonopError):
        exporter.reference_evaluator(model, ALLOW).run(None, feeds)


def test_a_crafted_node_that_is_honest():
    model = crafted()
    for session in (
        exporter.inference_session(model, ALLOW),
        onnxruntime.InferenceSession(model.SerializeToString(), exporter.session_options(ALLOW)),
    ):
        y, z, ty, tz = session.run(None, dict.fromkeys(("x0", "x1", "x2", "x3"), ONES))
        np.testing.assert_allclose((y, z, ty, tz), (3 * ONES, np.e * ONES, 6 * ONES, np.e * ONES), rtol=1e-6)


def test_more_and_fewer_inputs_than_its_attributes_say():
    model = crafted()
    model.graph.node[0].input.append("x0")
    refused(model, "the graph gives it 5 tensors, its attributes say 4|it takes 2 tensors")
    model = crafted()
    del model.graph.node[0].input[1:]
    for run in (exporter.inference_session(model, ALLOW).run, exporter.reference_evaluator(model, ALLOW).run):
        with pytest.raises((PythonopError, TypeError, RuntimeError)):  # the Function gets None for a tensor
            run(None, dict.fromkeys(("x0", "x1", "x2", "x3"), ONES))


def test_more_outputs_than_its_attributes_say():
    model = crafted()
    model.graph.node[0].output.append("y9")
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("y9", 1, None))
    with pytest.raises(FormatError, match="it has 5 outputs in the graph, 4 by its attributes"):
        exporter.inference_session(model, ALLOW)


@pytest.mark.parametrize("name", [KEPT_OUTPUTS, ABSENT_INPUTS])
@pytest.mark.parametrize("places", [[-1], [4], [1, 0], [0, 0], [1 << 62], [0] * 100_000], ids=lambda p: str(p)[:12])
def test_places_that_prepare_does_not_write(name, places):
    model = crafted()
    model.graph.node[0].attribute.append(onnx.AttributeProto(name=name, type=onnx.AttributeProto.INTS, ints=places))
    with pytest.raises(FormatError, match=name):
        exporter.inference_session(model, ALLOW)
    with pytest.raises(Exception, match=f"FormatError: (.|\n)*{name}"):
        onnxruntime.InferenceSession(model.SerializeToString(), exporter.session_options(ALLOW))


def test_a_tangent_of_integers_is_wanted():
    refused(finish_indices(), "its output 4 has a name, and is the tangent of an output of type INT64|a tangent is wanted")


def finish_indices():
    call = record(zoo.WithIndices, X)
    inputs = [value(f"x{i}", 1, 2) for i in range(2)]
    outputs = [value(f"y{i}", call.output_types[i % 3], 2) for i in range(6)]
    return finish(
        inputs,
        outputs,
        [ir.Node(OWN_DOMAIN, PYTHON_OP_TANGENT, inputs, ir_attributes(write_attributes(call)), outputs=outputs, name="op0")],
    )


def test_a_tangent_of_another_type():
    model = crafted()
    model.graph.input[2].type.tensor_type.elem_type = onnx.TensorProto.INT64
    refused(model, "the tangent of input 0 is torch.int64", RunError)


@pytest.mark.parametrize(
    ("name", "given"),
    [("name", b"\xff\xfe"), ("call", "{"), ("output_tensor_types", [99]), ("input_convention", "d"), ("input_tensor_types", [1])],
)
def test_attributes(name, given):
    model = crafted()
    (attribute,) = [a for a in model.graph.node[0].attribute if a.name == name]
    attribute.CopyFrom(onnx.helper.make_attribute(name, given))
    feeds = dict.fromkeys(("x0", "x1", "x2", "x3"), ONES)
    for make in (exporter.inference_session, exporter.reference_evaluator):
        with pytest.raises(PythonopError):
            make(model, ALLOW).run(None, feeds)


def test_the_gate():
    for make in (exporter.inference_session, exporter.reference_evaluator):
        with pytest.raises(TrustError, match=r"tests\.zoo\.forward_mode:TwoByTwo"):
            make(crafted(), ["other:*"])
