"""Gradients that are zero, absent or of an infinite cotangent, as eager's; indices of both integer types; graphs that several threads build."""

from __future__ import annotations

import sys
import threading

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional as F

import exporter
from tests.support import Calls
from tests.symbolics.gradients.tools import check, gradients, model_of


def build(text: str) -> onnx.ModelProto:
    """The gradient graph of a model's text; valid, with all checks."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20, "own": 1]> {text}')
    proto = ir.to_proto(exporter.build_gradient_graph(model))
    if not any(node.domain for node in proto.graph.node):
        onnx.checker.check_model(proto, full_check=True)
    return proto


def loaded(function: str, x: torch.Tensor) -> torch.Tensor:
    """The gradient of the sum of y = f(x), by a loaded file."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g (float[{len(x)}] x) => (float[{len(x)}] y) {{ {function} }}'
    )
    x = x.clone().requires_grad_()
    exporter.load(model)(x).sum().backward()
    return x.grad


#: Operators whose gradient is zero somewhere, and what eager computes: behind a square root, that zero meets an infinity.
MASKED = {
    "relu": ("h = Relu(x)", F.relu),
    "max": ("o = Sub(x, x)\n h = Max(x, o)", lambda x: torch.maximum(x, x - x)),
    "min": ("o = Sub(x, x)\n n = Neg(x)\n m = Min(n, o)\n h = Neg(m)", lambda x: -torch.minimum(-x, x - x)),
    "clip": ("l = Constant<value_float = 0.0>()\n h = Clip(x, l)", lambda x: x.clamp(min=0.0)),
    "thresholded": ("h = ThresholdedRelu<alpha = 1.0>(x)", lambda x: F.threshold(x, 1.0, 0.0)),
    "shrink": ("s = Shrink<lambd = 1.0, bias = 0.0>(x)\n h = Abs(s)", lambda x: F.hardshrink(x, 1.0).abs()),
    "hard sigmoid": ("h = HardSigmoid<alpha = 0.16666667, beta = 0.5>(x)", F.hardsigmoid),
    "hard swish": ("s = HardSwish(x)\n l = Constant<value_float = 0.0>()\n h = Clip(s, l)", lambda x: F.hardswish(x).clamp(min=0.0)),
    "where": (
        "l = Constant<value_float = 0.0>()\n c = Greater(x, l)\n h = Where(c, x, l)",
        lambda x: torch.where(x > 0, x, torch.zeros(())),
    ),
}


@pytest.mark.parametrize("case", MASKED)
def test_zero_times_infinity_is_what_eager_has(case):
    text, function = MASKED[case]
    x = torch.tensor([-5.0, -1.5, 0.7, 2.0, 4.0], requires_grad=True)
    function(x).sqrt().sum().backward()
    torch.testing.assert_close(loaded(f"{text}\n y = Sqrt(h)", x.detach()), x.grad, equal_nan=True)


@pytest.mark.parametrize("size", [3, 100_000])
def test_zero_times_infinity_in_a_fused_chain(size):
    """Long enough for one node of the native library in a step."""
    x = torch.linspace(-2, 2, size, requires_grad=True)
    (torch.sqrt(torch.relu(x * 3.0)) * 0.5 + x).sum().backward()
    text = """three = Constant<value_float = 3.0>() half = Constant<value_float = 0.5>()
    a = Mul(x, three) b = Relu(a) c = Sqrt(b) d = Mul(c, half) y = Add(d, x)"""
    torch.testing.assert_close(loaded(text, x.detach()), x.grad, equal_nan=True)


@pytest.mark.parametrize("op", ["Ceil", "Floor", "Round", "Sign"])
def test_flat_operators_give_zeros(op):
    x = torch.tensor([-1.2, 0.4, 2.6])
    torch.testing.assert_close(loaded(f"y = {op}(x)", x), torch.zeros(3))
    torch.testing.assert_close(loaded(f"a = Exp(x)\n b = {op}(a)\n y = Add(b, x)", x), torch.ones(3))


def test_a_power_of_zero_gives_zeros():
    torch.testing.assert_close(
        loaded("zero = Constant<value_float = 0.0>()\n y = Pow(x, zero)", torch.tensor([-1.0, 0.0, 2.0])), torch.zeros(3)
    )


def test_an_operator_without_a_rule_behind_a_flat_one_is_no_obstacle():
    proto = build("g (float[3] x) => (float[3] y) { a = own.Unknown(x)  b = Exp(a)  c = Round(b)  y = Add(c, x) }")
    assert [node.op_type for node in proto.graph.node if node.domain == "own"] == ["Unknown"]
    with pytest.raises(exporter.UnsupportedOperatorError, match="Unknown"):
        build("g (float[3] x) => (float[3] y) { a = own.Unknown(x)  y = Exp(a) }")


def test_a_weight_behind_a_flat_operator_decays():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([1.3, -2.2, 3.0]))
            self.b = torch.nn.Parameter(torch.zeros(3))

        def forward(self, x):
            return x * torch.round(self.w) + self.b

    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 3)
    module = exporter.load(exporter.export(net, (x,)))
    net(x).sum().backward(), module(x).sum().backward()
    torch.testing.assert_close(module.get_parameter("w").grad, net.w.grad)


#: Each has indices that ONNX lets be of int32 or int64, and a gradient that writes by them.
INDEXED = {
    "gather": ("K[2, 3] i", "y = Gather<axis = 0>(x, i)"),
    "gather along the last axis": ("K[2, 3] i", "y = Gather<axis = 1>(x, i)"),
    "gather elements": ("K[4, 4] i", "y = GatherElements<axis = 1>(x, i)"),
    "scatter elements": ("K[4, 4] i", "u = GatherElements<axis = 1>(x, i)  y = ScatterElements<axis = 1, reduction = 'add'>(x, i, u)"),
    "loss": ("K[4] i", "l = LogSoftmax<axis = 1>(x)  y = NegativeLogLikelihoodLoss<reduction = 'mean'>(l, i)"),
    "cross entropy": ("K[4] i", "y = SoftmaxCrossEntropyLoss<reduction = 'mean'>(x, i)"),
}


@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("case", INDEXED)
def test_indices_of_both_integer_types(case, kind):
    indices, body = INDEXED[case]
    rng = np.random.default_rng(0)
    shape = [int(n) for n in indices[2 : indices.index("]")].split(",")]
    feeds = {"x": rng.standard_normal((4, 4)).astype(np.float32), "i": rng.integers(0, 4, shape).astype(kind)}
    signature, body = f"float[4, 4] x, {indices.replace('K', kind)}", body.replace("'", '"')
    gradients(signature, body, {**feeds, "y_grad": np.ones(np.shape(reference(signature, body, feeds)), np.float32)}, wrt=["x"])
    check(signature, body, feeds, order=1, wrt=["x"])


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_indices_of_both_integer_types_in_a_loop(kind):
    body = """n = Constant<value = int64 {2}>()  c = Constant<value = bool {1}>()
    y = Loop(n, c, x) <body = b (int64 k, bool on, float[4, 4] h) => (bool go, float[4, 4] out)
        { go = Identity(on)  w = Gather<axis = 0>(h, i)  out = Mul(w, h) }>"""
    x, i = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True), torch.tensor([2, 0, 2, 1])
    h = x
    for _ in range(2):
        h = h[i] * h
    h.sum().backward()
    feeds = {"x": x.detach().numpy(), "i": i.numpy().astype(kind), "y_grad": np.ones((4, 4), np.float32)}
    got = gradients(f"float[4, 4] x, {kind}[4] i", body, feeds, wrt=["x"])
    torch.testing.assert_close(torch.tensor(got["x_grad"]), x.grad)


def reference(signature: str, body: str, feeds: dict[str, np.ndarray]) -> np.ndarray:
    return onnx.reference.ReferenceEvaluator(model_of(signature, body)).run(None, feeds)[0]


def test_graphs_that_several_threads_build_at_once():
    """onnx_ir has one handler of arithmetic for the whole process, and rules are arithmetic."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[2, 3] x) => (float[2, 3] y) { a = Gelu(x)  b = Softmax(a)  c = Tanh(b)  y = Mul(c, x) }"""
    )
    expected = ir.to_proto(exporter.build_gradient_graph(model)).SerializeToString(deterministic=True)
    found: list[object] = []

    def work() -> None:
        for _ in range(15):
            try:
                found.append(ir.to_proto(exporter.build_gradient_graph(model)).SerializeToString(deterministic=True) == expected)
            except Exception as error:
                found.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert found == [True] * 60


def test_arithmetic_on_values_outside_of_a_rule_is_said():
    with pytest.raises(ValueError, match="handler|outside of a rule"):
        ir.val("a") + ir.val("b")


@pytest.mark.filterwarnings("ignore")
def test_an_output_whose_rank_hangs_on_an_open_size(dynamo):
    """squeeze() takes an open axis where it is 1: what comes from outside has the output's rank then."""
    model = Calls(lambda x: ((x * torch.arange(3.0)).squeeze(), (x * torch.arange(3.0))[:, None].squeeze().sigmoid()))
    module = exporter.load(exporter.export(model, (torch.randn(4, 3),), dynamo=dynamo, dynamic_shapes=(({0: "batch"},),)))
    for rows in (1, 5):
        ours, theirs = (x.requires_grad_() for x in (torch.ones(rows, 3), torch.ones(rows, 3)))
        for given, called in ((ours, module), (theirs, model)):
            sum(result.sin().sum() for result in called(given)).backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore")
def test_the_angle_of_a_complex_zero_has_no_slope():
    """A silent clip among others: eager's gradient is finite."""
    x = torch.stack([torch.zeros(8), torch.linspace(-1, 1, 8)])
    module = exporter.load(exporter.export(Calls(lambda x: torch.fft.rfft(x).angle()), (x,)))
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    module(ours).sin().sum().backward()
    torch.fft.rfft(theirs).angle().sin().sum().backward()
    assert theirs.grad.isfinite().all()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
