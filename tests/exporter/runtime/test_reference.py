"""The semantics of one call and its backward, on onnx.reference."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

import exporter.runtime.reference as reference
from exporter.runtime.store import ContextStore
from symbolics.errors import RunError, TrustError
from symbolics.node.call import Autocast
from tests.exporter.runtime.build import forward, record, training
from tests.exporter.runtime.cases import CASES, check_case
from tests.zoo import functions as F

ALLOW = ["tests.zoo.functions:*"]


class Runner:
    """One model on onnx.reference, with tensors in and out."""

    def __init__(self, model, **options):
        self.evaluator = reference.reference_evaluator(model, ALLOW, **options)
        self.store = self.evaluator.store

    def run(self, *tensors):
        feeds = dict(zip(self.evaluator.input_names, map(reference.to_array, tensors), strict=True))
        return [reference.to_tensor(array) for array in self.evaluator.run(None, feeds)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_semantics(case):
    check_case(case, Runner)


def test_the_recorded_autocast_state_counts_and_no_other():
    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = a @ b
        call = record(F.AutocastMatmul, a, b, autocast=Autocast({"cpu": "bfloat16"}))
    y, *_ = Runner(training(call)).run(a, b, torch.ones(2, 2, dtype=torch.bfloat16))
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, expected)
    plain = record(F.AutocastMatmul, a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        y, *_ = Runner(training(plain)).run(a, b, torch.ones(2, 2))
    assert y.dtype is torch.float32


def test_random_draws_follow_torch():
    x = torch.randn(64, requires_grad=True)
    runner = Runner(training(record(F.Draws, x)))
    torch.manual_seed(3)
    y, gradient = runner.run(x, torch.ones(64))
    torch.manual_seed(3)
    assert torch.equal(y, F.Draws.apply(x).detach())
    assert torch.equal(gradient, (y != 0).float())


def test_contexts():
    x = torch.randn(3, requires_grad=True)
    call = record(F.SavesInput, x)
    runner = Runner(forward(call, context=True))
    _, handle = runner.run(x)
    assert len(runner.store) == 1
    assert handle.shape == ()
    assert 0 < int(handle) < 2**63
    runner.run(x)
    assert len(runner.store) == 2  # the caller has the handle
    runner.store.clear()
    with pytest.raises(RunError, match="run already"):
        runner.store.take(int(handle), "0.0", "tests.zoo.functions:SavesInput")


def test_retained_contexts_and_kept_ones():
    x = torch.randn(3, requires_grad=True)
    store = ContextStore(retain=True)
    runner = Runner(training(record(F.SavesInput, x)), store=store)
    runner.run(x, torch.ones(3))
    assert len(store) == 0  # no result names it: nobody could use it
    keeper = Runner(forward(record(F.SavesInput, x)), store=ContextStore(keep=True))
    keeper.run(x)
    assert len(keeper.store) == 1


def test_an_exception_is_the_original_and_frees_what_the_run_made():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    runner = Runner(training(record(F.Raises, x), repeat=3))
    with pytest.raises(F.CustomError) as caught:
        runner.run(x, -torch.ones(2))
    assert caught.value.detail == {"at": 1}
    assert any(frame.name == "backward" for frame in caught.traceback)
    assert len(runner.store) == 0
    runner.run(x, torch.ones(2))


def test_the_gate_closes_before_anything_runs():
    model = forward(record(F.SavesInput, torch.randn(3, requires_grad=True)))
    with pytest.raises(TrustError, match=r"op0.*functions:SavesInput.*allow="):
        reference.reference_evaluator(model)


def test_bodies_functions_and_marks(tmp_path):
    x = torch.randn(3, requires_grad=True)
    branch = forward(record(F.SavesInput, x)).graph
    node = branch.node[0]
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1, "pythonop": 1, "local": 1]>'
        "main (bool c, float[N] x0) => (float[N] y) { m = pythonop.StopGradient(x0) z = local.F(m) y = If(c) "
        "<then_branch = then () => (float[N] t) { t = Identity(x0) }, else_branch = other () => (float[N] e) { e = Identity(z) }> }"
        '<domain: "local", opset_import: ["": 20, "com.microsoft": 1]> F (x0) => (op0_0) { op0_0 = Identity(x0) }'
    )
    del model.functions[0].node[:]
    model.functions[0].node.append(node)
    model.functions[0].output[0] = node.output[1]
    then = model.graph.node[2].attribute[0].g
    then.node[0].CopyFrom(node)
    then.node[0].output[1] = "t"
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    evaluator = reference.reference_evaluator(path, ALLOW)
    for c in (True, False):
        (y,) = evaluator.run(None, {"c": torch.tensor(c).numpy(), "x0": x.detach().numpy()})
        assert torch.equal(torch.from_numpy(y), x.detach().sin())


@pytest.mark.parametrize(("shape", "axis"), [((3, 5), -1), ((3, 100), 1), ((70, 2), 0)])
def test_gather_elements_takes_any_axis_of_any_length(shape, axis):
    """onnx's own operator refuses these; the file of max(dim) has one."""
    text = f"<ir_version: 10, opset_import: ['' : 18]> g (float[A,B] x, int64[C,D] i) => (float[C,D] y) {{ y = GatherElements<axis = {axis}>(x, i) }}"
    model = onnx.parser.parse_model(text.replace("'", '"'))
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    indices = x.argmax(axis, keepdims=True)
    (y,) = reference.reference_evaluator(model).run(None, {"x": x, "i": indices})
    np.testing.assert_array_equal(y, x.max(axis, keepdims=True))


def test_an_absent_gradient_is_absent_behind_an_output_without_a_name():
    """onnx.reference keeps what the last such output was, under the name of all of them."""
    model = training(record(F.TwoInputs, torch.ones(2), torch.ones(2, requires_grad=True)))
    op, grad = model.graph.node
    assert "" in grad.output
    again = onnx.NodeProto()
    again.CopyFrom(op)
    again.output[:] = ["other_context", "other_0", "other_1"]
    second = onnx.NodeProto()
    second.CopyFrom(grad)
    second.input[:] = ["other_context", "g0", "", *second.input[3:]]
    second.output[1] = "other_grad"
    model.graph.node.extend([again, second])
    model.graph.output.append(onnx.helper.make_tensor_value_info("other_grad", 1, None))
    feeds = {v.name: np.ones(2, np.float32) for v in model.graph.input}
    (found,) = reference.reference_evaluator(model, ALLOW).run(["other_grad"], feeds)
    assert found.tolist() == [2.0, 2.0]
