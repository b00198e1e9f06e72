"""Memory that onnxruntime reuses: what a call saved, kept or changed behind its back stays right, or is an error."""

from __future__ import annotations

import onnx
import onnxruntime
import pytest
import torch

from exporter.runtime.session import inference_session
from symbolics.errors import RunError
from tests.exporter.runtime.build import forward, record, sandwich
from tests.exporter.runtime.runner import Runner
from tests.zoo import functions as F

ALLOW = ["tests.zoo.functions:*"]


@pytest.mark.parametrize("shape", [pytest.param((2, 4), id="2x4"), pytest.param((1 << 24,), id="64MB", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cls", [F.SavesInput, F.SavesOutput, F.SavesIntermediate, F.KeepsInputOnCtx, F.SavesNothing])
def test_gradients_where_ort_reuses_buffers(cls, shape):
    # Relu -> F -> Neg: ORT gives the memory of F's input and output to later nodes as soon as it may.
    x = torch.randn(shape)
    model = sandwich(cls, x)
    leaf = x.clone().requires_grad_()
    expected = -cls.apply(leaf.relu() * 0.5)
    seed = torch.randn(shape)
    (expected_gradient,) = torch.autograd.grad(expected, leaf, seed)
    runner = Runner(model)
    for run in range(50 if len(shape) == 2 else 3):
        y, gradient = runner.run(x, seed)
        if run in (0, 1, 2, 49):
            torch.testing.assert_close(y, expected.detach(), rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-7)
    assert len(runner.store) == 0


@pytest.mark.parametrize("size", [8, 1 << 15])
@pytest.mark.parametrize("cls", [F.ChangesInput, F.ChangesInputThroughNumpy])
def test_an_undeclared_change_never_reaches_another_node(cls, size):
    x = torch.randn(size)
    call = record(cls, x[:8].clone().requires_grad_())
    model = forward(call)
    graph = model.graph
    graph.node[0].input[0] = "weight"
    del graph.input[:], graph.output[1:]
    graph.node[0].output[1] = "y"
    graph.node.append(onnx.helper.make_node("Identity", ["weight"], ["other"]))
    graph.initializer.append(onnx.numpy_helper.from_array(x.numpy(), "weight"))
    del graph.output[:]
    graph.output.extend([onnx.helper.make_tensor_value_info(name, 1, None) for name in ("y", "other")])
    runner = Runner(model)
    for _ in range(4):
        y, other = runner.run()
        assert torch.equal(y, x * 2)
        assert torch.equal(other, x)


def test_large_inputs_are_read_in_place_once_a_run_has_shown_that_nobody_keeps_them():
    seen.clear()
    x = torch.randn(1 << 16, requires_grad=True)
    for context in (False, True):
        session = inference_session(forward(record(Watches, x), context=context), [Watches])
        value = onnxruntime.OrtValue.ortvalue_from_numpy(x.detach().numpy())
        seen.clear()
        for _ in range(3):
            session.run_with_ort_values(None, {"x0": value})
        assert seen[0] != value.data_ptr()
        assert seen[1:] == [value.data_ptr()] * 2


seen: list[int] = []
kept: list[torch.Tensor] = []


class Watches(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        seen.append(x.data_ptr())
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class KeepsLater(torch.autograd.Function):
    runs = 0

    @staticmethod
    def forward(ctx, x):
        KeepsLater.runs += 1
        if KeepsLater.runs in (3, 4):
            kept.append(x)
        return x * 2


@pytest.mark.parametrize("how", ["keeps", "changes"])
def test_a_change_of_habit_is_an_error_once_and_right_from_then_on(how):
    x = torch.randn(1 << 16)
    cls = KeepsLater if how == "keeps" else F.ChangesLater
    model = forward(record(cls, x))
    cls.runs = 0
    runner = Runner(model, allow=[cls])
    runner.run(x)
    runner.run(x)
    with pytest.raises(RunError, match="kept an input" if how == "keeps" else "changed an input"):
        runner.run(x.clone())
    (y,) = runner.run(x)
    assert torch.equal(y, x * 2)
    kept.clear()
