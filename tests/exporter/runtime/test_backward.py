"""PythonOpBackward: orders 2 and 3 of one call are eager's, on every runtime, and no context is left."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch.autograd import Function

import exporter
from exporter.runtime.prepare import prepare
from exporter.runtime.reference import reference_evaluator
from exporter.runtime.session import inference_session, session_options
from exporter.runtime.store import ContextStore
from symbolics.errors import FormatError, RunError
from symbolics.graph.values import is_python_op
from symbolics.node.backward import is_backward
from tests.exporter.runtime.orders import close, graph, numbers
from tests.processes import python
from tests.zoo import functions as F

ALLOW = ["tests.zoo.functions:*", "tests.exporter.runtime.test_backward:*"]


class Noisy(Function):
    """Draws in forward and in backward, and keeps what it drew."""

    @staticmethod
    def forward(ctx, x):
        ctx.noise = torch.randn_like(x)
        ctx.save_for_backward(x)
        return x * x * ctx.noise

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        ctx.more = torch.rand_like(x)
        return g * g * x * ctx.noise * ctx.more


class Counts(Function):
    """A state that every run of forward changes."""

    runs = 0
    backwards = 0

    @staticmethod
    def forward(ctx, x):
        Counts.runs += 1
        ctx.runs = Counts.runs
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        Counts.backwards += 1
        (x,) = ctx.saved_tensors
        return g * x * x * ctx.runs


class Both(Function):
    """Saves an input, an output, and something between; neither gradient is the derivative of forward."""

    @staticmethod
    def forward(ctx, a, b):
        y, half = a * b, a / 2
        ctx.half = half
        ctx.save_for_backward(a, y)
        return y, y + a

    @staticmethod
    def backward(ctx, g, h):
        a, y = ctx.saved_tensors
        return g * y * a + h * ctx.half, (g + h) * y


def double(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


CASES = {
    "saved input": (F.SavesInput, [double(2, 3)]),
    "saved output": (F.SavesOutput, [double(2, 3)]),
    "saved between": (F.SavesIntermediate, [double(2, 3)]),
    "nothing saved": (F.SavesNothing, [double(2, 3)]),
    "input on ctx": (F.KeepsInputOnCtx, [double(2, 3)]),
    "two inputs": (F.TwoInputs, [double(2, 3), double(2, 3), 1.5]),
    "one input frozen": (F.TwoInputs, [double(2, 3), torch.randn(2, 3, dtype=torch.float64), 1.5]),
    "no gradient": (F.NoneGradient, [double(2, 3), double(2, 3)]),
    "materialized": (F.Materializes, [double(2, 3)]),
    "not materialized": (F.DoesNotMaterialize, [double(2, 3)]),
    "integer output": (F.IntegerOutput, [double(2, 3)]),
    "not differentiable": (F.NonDifferentiable, [double(2, 3)]),
    "input returned": (F.ReturnsInput, [double(2, 3)]),
    "setup_context": (F.SetupContext, [double(2, 3), 4]),
    "all": (Both, [double(2, 3), double(2, 3)]),
    "a view": (F.ReturnsView, [double(2, 3)]),
    "more than tensors": (F.OddOutputs, [double(2, 3)]),
    "no element": (F.SavesInput, [double(0, 3)]),
    "scalar": (F.SavesOutput, [double()]),
    "large": (Both, [double(96, 96), double(96, 96)]),
}
MAKERS = {
    "onnxruntime": lambda model: inference_session(model, ALLOW),
    "the path of devices": lambda model: inference_session(model, sess_options=session_options(ALLOW, device="borrow")),
    "onnx.reference": lambda model: reference_evaluator(model, ALLOW),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("case", CASES)
def test_the_second_order_is_eagers(case, make):
    cls, args = CASES[case]
    feeds, wanted = numbers(cls, *args)
    session = make(graph(cls, *args))
    names = list(wanted)
    for _ in range(2):
        close(dict(zip(names, session.run(names, feeds), strict=True)), wanted)
        assert not session.store.contexts
        assert not session.store._taken


@pytest.mark.parametrize("case", ["saved input", "saved output", "two inputs", "all"])
def test_the_third_order_is_eagers(case):
    cls, args = CASES[case]
    feeds, wanted = numbers(cls, *args, order=3)
    names = list(wanted)
    for make in (MAKERS["onnxruntime"], MAKERS["onnx.reference"]):
        session = make(graph(cls, *args, order=3))
        close(dict(zip(names, session.run(names, feeds), strict=True)), wanted)
        assert not session.store.contexts


def test_what_forward_and_backward_draw_is_drawn_once():
    """The second order differentiates the very backward that gave the first: their random factors are the same."""
    model = graph(Noisy, double(2, 3))
    feeds = {v.name: np.random.default_rng(i).normal(size=(2, 3)) for i, v in enumerate(model.graph.inputs)}
    x, g, u = feeds["x0"], feeds["op0_0_grad"], feeds["x0_grad_grad"]
    for make in MAKERS.values():
        found = dict(zip([v.name for v in model.graph.outputs], make(model).run(None, feeds), strict=True))
        factors = found["x0_grad"] / (g**2 * x)  # what forward drew times what backward drew
        np.testing.assert_allclose(found["op0_0_grad_grad"], u * 2 * g * x * factors, rtol=1e-9)


def test_forward_runs_once_and_each_backward_once():
    model = graph(Counts, double(2, 3))
    feeds = {v.name: np.ones((2, 3)) for v in model.graph.inputs}
    session = inference_session(model, ALLOW)
    before = Counts.runs, Counts.backwards
    session.run(None, feeds)
    assert (Counts.runs, Counts.backwards) == (before[0] + 1, before[1] + 2)  # of x_grad, and of the cotangent of y


def test_a_plain_session_leaves_no_context():
    """Nobody cleans up after onnxruntime's own class: the last reader frees."""
    proto = ir.to_proto(graph(Both, double(2, 3), double(2, 3)))
    prepare(proto)
    store = ContextStore()
    session = onnxruntime.InferenceSession(proto.SerializeToString(), session_options(ALLOW, store=store))
    for _ in range(3):
        session.run(None, {v.name: np.ones((2, 3)) for v in session.get_inputs()})
        assert len(store) == 0
        assert not store._taken


def test_once_differentiable_is_an_error_that_names_the_function():
    model = graph(F.Once, double(2, 3))
    feeds = {v.name: np.ones((2, 3)) for v in model.graph.inputs}
    for make in MAKERS.values():
        session = make(model)
        with pytest.raises(RunError, match=r"functions:Once.*once_differentiable"):
            session.run(None, feeds)
        assert not session.store.contexts


def test_an_exception_in_the_backward_is_the_functions_own():
    class_name = "RaisesLater"
    model = graph(RaisesLater, double(2))
    for make in MAKERS.values():
        session = make(model)
        with pytest.raises(ZeroDivisionError, match=class_name):
            session.run(None, {v.name: np.ones(2) for v in model.graph.inputs})
        assert not session.store.contexts


class RaisesLater(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        raise ZeroDivisionError("RaisesLater")


def test_order_1_gives_and_makes_no_gradient_of_an_output():
    """The outputs of the call are among its targets, for order 2 alone: a run makes no zeros as large as they are."""
    model = graph(F.SavesOutput, double(2, 3))
    first, second = sorted(filter(is_backward, model.graph), key=lambda n: n.attributes["order"].as_int())[::2]
    wanted = [list(node.attributes["output_tensor_requires_grads"].as_ints()) for node in (first, second)]
    assert wanted[0] == [1, 0] and wanted[1][:2] == [1, 1]  # of the input and of the output, which backward reads
    (call,) = [node for node in model.graph if is_python_op(node)]
    assert first.inputs[-1] is call.outputs[1] and not first.outputs[1].name


def test_a_context_of_another_order_is_refused():
    model = graph(F.SavesInput, double(2))
    first, _, second = sorted(filter(is_backward, model.graph), key=lambda n: n.attributes["order"].as_int())
    assert (first.attributes["order"].as_int(), second.attributes["order"].as_int()) == (1, 2)
    second.replace_input_with(0, first.inputs[0])
    for make in MAKERS.values():
        with pytest.raises(RunError, match=r"PythonOpBackward of .*order 2.*belongs to.* to the PythonOpBackward of another"):
            make(model).run(None, {v.name: np.ones(2) for v in model.graph.inputs})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("order", 0),
        ("order", -(1 << 60)),
        ("readers", 0),
        ("output_tensor_requires_grads", [1] * 9),
        ("output_tensor_requires_grads", [2]),
        ("input_tensor_requires_grads", [-1]),
        ("output_tensor_types", [1 << 40]),
        ("name", 3),
    ],
)
def test_a_crafted_node_is_a_format_error(name, value):
    """A list is the first entries; the others stay."""
    model = graph(F.SavesInput, double(2))
    node = next(n for n in model.graph if is_backward(n))
    if isinstance(value, list):
        node.attributes[name] = ir.AttrInt64s(name, [*value, *node.attributes[name].as_ints()[len(value) :]])
    else:
        node.attributes[name] = ir.AttrInt64(name, value)
    for make in MAKERS.values():
        with pytest.raises(FormatError):
            make(model)


def test_many_readers_that_never_come_are_freed_with_the_run():
    model = graph(F.SavesInput, double(2))
    for node in model.graph:
        if is_backward(node):
            node.attributes["readers"] = ir.AttrInt64("readers", 1 << 40)
    for make in MAKERS.values():
        session = make(model)
        session.run(None, {v.name: np.ones(2) for v in model.graph.inputs})
        assert not session.store.contexts
        assert not session.store._taken


def test_check_gradients_takes_a_model_with_a_function():
    x = torch.randn(2, 3)
    program = exporter.export(Small(), (x,), eager_check=False)
    assert exporter.check_gradients(program, order=2, allow=ALLOW, inputs={"x": x.numpy()}) < 1e-4
    assert exporter.check_gradients(program, order=3, allow=ALLOW, inputs={"x": x.numpy()}, samples=4) < 1e-4
    with pytest.raises(exporter.TrustError, match="SavesOutput"):
        exporter.check_gradients(program)


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))

    def forward(self, x):
        return F.SavesInput.apply(F.SavesOutput.apply(x * self.weight) * x)


def test_a_saved_file_runs_in_a_fresh_process(tmp_path):
    args = CASES["all"][1]
    onnx.save(ir.to_proto(graph(Both, *args)), tmp_path / "second.onnx")
    feeds, wanted = numbers(Both, *args)
    np.savez(tmp_path / "feeds.npz", **feeds)
    np.savez(tmp_path / "wanted.npz", **wanted)
    done = python(
        "-m", "tests.exporter.runtime.fresh", *(str(tmp_path / name) for name in ("second.onnx", "feeds.npz", "wanted.npz", "out.npz"))
    )
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "out.npz")
    for runtime in ("onnxruntime", "onnx.reference"):
        close({name: found[f"{runtime}/{name}"] for name in wanted}, wanted)
