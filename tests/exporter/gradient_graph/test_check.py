"""check_gradients: what a model needs to run in float64, on onnx's reference evaluator."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import exporter
from exporter.runtime.mended_operators import MendedEvaluator
from symbolics.errors import RunError


class Scaled(torch.autograd.Function):
    """Its body has constants, which an export writes into a function."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.tanh(x + 3.0) / 6.0

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        y = torch.tanh(x + 3.0)
        return grad * (y + x * (1.0 - y * y)) / 6.0


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)

    def forward(self, x):
        return Scaled.apply(self.linear(x))


@pytest.mark.parametrize("order", [1, 2])
def test_constants_in_functions(order):
    program = exporter.export(Model(), (torch.randn(2, 3),), portable=True)
    assert any(node.op_type == "Constant" for function in program.model.functions.values() for node in function)
    assert exporter.check_gradients(program, order=order) < 1e-5


@pytest.mark.parametrize("strides", [1, 2])
def test_a_convolution_of_open_sizes(strides):
    """Its gradient cuts off by Pad, which onnx's own evaluator does not."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[n,2,h,w] x) => (float[n,3,a,b] y) <float[3,2,3,3] k>
    {{ y = Conv<kernel_shape = [3, 3], strides = [{strides}, {strides}], pads = [1, 1, 1, 1]>(x, k) }}"""
    model = onnx.parser.parse_model(text.replace(" <float[3,2,3,3] k>", ""))
    kernel = np.random.default_rng(0).normal(size=(3, 2, 3, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(kernel, "k"))
    assert exporter.check_gradients(model, order=1, inputs={"x": np.random.default_rng(1).normal(size=(2, 2, 5, 6))}) < 1e-6


@pytest.mark.parametrize(
    ("opset", "pad"), [(2, "Pad<pads = [1, 0, 0, 2], value = 1.5>(x)"), (18, "Pad(x, p, v)"), (18, 'Pad<mode = "reflect">(x, p)')]
)
def test_pads_that_only_add_are_as_onnx_has_them(opset, pad):
    more = "" if opset == 2 else "p = Constant<value_ints = [1, 0, 0, 2]>() v = Constant<value_float = 1.5>() "
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[A,B] x) => (float[C,D] y) {{ {more} y = {pad} }}'
    )
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    (mended,) = MendedEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(mended, ReferenceEvaluator(model).run(None, {"x": x})[0])


def test_negative_pads_cut_off():
    text = '<ir_version: 8, opset_import: ["" : 18]> g (float[A,B] x) => (float[C,D] y) { p = Constant<value_ints = [-1, 1]>() a = Constant<value_ints = [-1]>() y = Pad(x, p, , a) }'
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for evaluator in (MendedEvaluator, exporter.reference_evaluator):
        (y,) = evaluator(onnx.parser.parse_model(text)).run(None, {"x": x})
        np.testing.assert_array_equal(y, [[1, 2, 0], [4, 5, 0]])


#: What onnx's own evaluator computes wrongly or not at all, with the shapes of x and of w, if there is one.
MENDED = {
    "Conv<group = 2, strides = [2, 2]>(x, w, b)": ((1, 2, 5, 6), (4, 1, 3, 2)),
    'Conv<group = 2, auto_pad = "SAME_LOWER">(x, w, b)': ((2, 2, 5, 6), (4, 1, 3, 2)),
    'Conv<group = 2, auto_pad = "VALID">(x, w)': ((1, 2, 5, 6), (4, 1, 3, 2)),
    "ConvTranspose<group = 2, strides = [2, 1]>(x, w, b)": ((2, 2, 3, 4), (2, 2, 3, 3)),
    "ConvTranspose<strides = [2, 1], pads = [1, 0, 0, 1]>(x, w)": ((1, 2, 3, 4), (2, 2, 3, 3)),
    "LRN<size = 3, alpha = 0.5>(x)": ((2, 5, 2, 2), None),
    "LRN<size = 5, alpha = 0.5, bias = 1.5>(x)": ((1, 5, 2, 2), None),
    "LpPool<kernel_shape = [2, 2], strides = [2, 2], p = 3, ceil_mode = 1>(x)": ((1, 2, 5, 6), None),
    "LpPool<kernel_shape = [3, 2], strides = [1, 2], pads = [1, 0, 1, 1], dilations = [2, 1]>(x)": ((1, 2, 5, 6), None),
    'LpPool<kernel_shape = [3, 2], strides = [2, 2], auto_pad = "SAME_UPPER">(x)': ((1, 2, 5, 6), None),
    "GlobalLpPool<p = 3>(x)": ((2, 2, 3, 4), None),
}


@pytest.mark.parametrize("call", MENDED)
def test_the_evaluator_computes_what_onnxruntime_does(call):
    shape, kernel = MENDED[call]
    rng = np.random.default_rng(0)
    values = {} if kernel is None else {"w": rng.standard_normal(kernel, np.float32), "b": rng.standard_normal(4, np.float32)}
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g (float[{",".join(map(str, shape))}] x) => (float[a,b,c,d] y) {{ y = {call} }}'
    )
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in values.items() if f" {name}" in call)
    x = rng.standard_normal(shape, np.float32)
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    (found,) = MendedEvaluator(model).run(None, {"x": x})
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert exporter.check_gradients(model, order=1, inputs={"x": x}) < 1e-5


def test_zeros_alone_show_nothing():
    """Integers are zeros where none are given: here they make everything zero."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[3] x, int64[3] k) => (float[3] y) { f = Cast<to = 1>(k) y = Mul(x, f) }"""
    )
    with pytest.warns(exporter.PythonopWarning, match=r"nothing but zeros: .*zeros for k\. .*inputs="):
        assert exporter.check_gradients(model, wrt=["x"]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert exporter.check_gradients(model, wrt=["x"], inputs={"k": np.array([1, 0, 2])}) < 1e-9


#: Control flow that onnx's own evaluator computes wrongly or not at all.
BODIES = {
    "matrices of each iteration": (
        "n = Constant<value = int64 {3}>() t = Constant<value = bool {1}>() last, y = Loop(n, t, x)"
        "<body = b (int64 i, bool c, float[2,3] s) => (bool c2, float[2,3] s2, float[2,3] out)"
        "{ c2 = Identity(c) s2 = Mul(s, x) out = Sin(s2) }>"
    ),
    "numbers of each iteration": (
        "n = Constant<value = int64 {3}>() t = Constant<value = bool {1}>() last, y = Loop(n, t, x)"
        "<body = b (int64 i, bool c, float[2,3] s) => (bool c2, float[2,3] s2, float out)"
        "{ c2 = Identity(c) s2 = Mul(s, x) out = ReduceMean<keepdims = 0>(s2) }>"
    ),
    "no iteration": (
        "n = Constant<value = int64 {0}>() t = Constant<value = bool {1}>() last, none = Loop(n, t, x)"
        "<body = b (int64 i, bool c, float[2,3] s) => (bool c2, float[2,3] s2, float[2,3] out)"
        "{ c2 = Identity(c) s2 = Mul(s, x) out = Sin(s2) }> z = Constant<value = int64[1] {0}>() u = Unsqueeze(x, z) y = Concat<axis = 0>(none, u)"
    ),
    "along other axes, backwards": (
        "h = Constant<value = float[2] {1.0, 2.0}>() last, y = Scan(h, x, x)<num_scan_inputs = 2, scan_input_axes = [1, -1],"
        "scan_input_directions = [1, 0], scan_output_axes = [-1], scan_output_directions = [1],"
        "body = b (float[2] s, float[2] p, float[2] q) => (float[2] s2, float[2] out) { m = Mul(s, p) s2 = Add(m, q) out = Sin(s2) }>"
    ),
    "a sequence beside another and a captured value": (
        "s = SplitToSequence<axis = 1>(x) m = SequenceMap(s, s, x)"
        "<body = b (float[2,1] p, float[2,1] q, float[2,3] v) => (float[2,3] out) { pq = Mul(p, q) pv = Mul(pq, v) out = Add(pv, x) }>"
        "y = ConcatFromSequence<axis = 0>(m)"
    ),
}


@pytest.mark.parametrize("body", BODIES)
def test_the_evaluator_runs_bodies_as_onnxruntime_does(body):
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g (float[2,3] x) => (float y) {{ {BODIES[body]} }}')
    model.graph.output[0].type.tensor_type.ClearField("shape")
    x = np.random.default_rng(0).standard_normal((2, 3), np.float32)
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    for evaluator in (MendedEvaluator, exporter.reference_evaluator):
        (found,) = evaluator(model).run(None, {"x": x})
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert exporter.check_gradients(model, inputs={"x": x}) < 1e-5


def test_norms_run_in_double():
    """onnx's own LayerNormalization refuses to compute in float64."""
    program = exporter.export(torch.nn.LayerNorm(6), (torch.randn(3, 6),))
    assert exporter.check_gradients(program) < 1e-6


UNARY = """Elu Celu Selu Erf Gelu Gelu<approximate="tanh"> HardSigmoid HardSwish LeakyRelu LogSoftmax Mish ReduceLogSumExp Sigmoid Softmax Softplus Softsign Tanh
Sin Cos Tan Atan Asinh Sinh Cosh Exp Sqrt Reciprocal MeanVarianceNormalization""".split()
NORMS = "LayerNormalization<axis=3>(x, w, w)", "GroupNormalization<num_groups=2>(x, w, w)", "InstanceNormalization(x, w, w)"


@pytest.mark.parametrize("call", [*(f"{name}(Add(x, one))" for name in UNARY), *NORMS])
def test_every_operator_is_computed_in_float64(call):
    """What is computed in float32 somewhere is off by 1e-3 in a difference of steps of 1e-4."""
    first = "moved = Add(x, one) " if "Add" in call else ""
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 21]> g (float[2,4,3,4] x, float one, float[4] w) => (float[a,b,c,d] y) {{ {first} y = {call.replace("Add(x, one)", "moved")} }}'
    )
    assert exporter.check_gradients(model, wrt=["x"], inputs={"one": np.array(1.5), "w": np.array([0.5, 1, 1.5, 2])}) < 1e-7


def test_optionals_are_checked():
    """onnx's own Optional is a list, which stays one behind OptionalGetElement, and is there when it is empty."""
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[2,3] x) => (float[2,3] y, bool has, bool none) <float[3] w = {1, 2, 3}>
    { o = Optional(x) has = OptionalHasElement(o) p = Optional<type = seq(float)>() none = OptionalHasElement(p) e = OptionalGetElement(o) y = Mul(e, w) }"""
    model = onnx.parser.parse_model(text)
    assert exporter.check_gradients(model, wrt=["x", "w"]) < 1e-9
    for evaluator in (MendedEvaluator, exporter.reference_evaluator):
        y, has, none = evaluator(model).run(None, {"x": np.ones((2, 3), np.float32)})
        assert bool(has) and not none and y.tolist() == [[1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ("z = Reshape(x, k) y = Mul(z, w)", r"Reshape \(node '' that makes 'z'\) \(ValueError"),
        ("z = com.microsoft.Gelu(x) y = Mul(z, w)", r"com.microsoft::Gelu \(node '' that makes 'z'\) \(.*unknown"),
        (
            "y = If(c) <then_branch = t () => (float[2,3] q) { r = Reshape(x, k) q = Mul(r, w) }, else_branch = e () => (float[2,3] n) { n = Neg(x) }>",
            r"Reshape \(node '' that makes 'r'\)",
        ),
    ],
)
def test_what_onnxs_evaluator_cannot_run_is_named(body, where):
    text = f"""<ir_version: 8, opset_import: ["" : 18, "com.microsoft": 1]> g (float[2,3] x) => (float y)
    <float[3] w = {{1, 2, 3}}, int64[1] k = {{7}}, bool c = {{1}}> {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(RunError, match=f"onnx.reference cannot run the model at {where}"):
        exporter.check_gradients(model, wrt=["w"])


def test_the_node_in_a_function_comes_first():
    """onnx's evaluator raises a TypeError of a function's body anew, without a word of the node in it."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20, "my" : 1]> g (float[3] x) => (float[3,4] y) { y = my.Outer(x) }
    <domain: "my", opset_import: ["" : 20, "my" : 1]> Outer (x) => (y) { y = my.Hot(x) }
    <domain: "my", opset_import: ["" : 20]> Hot (x) => (y) {
      t = Constant<value_ints = [1, 2, 0]>() depth = Constant<value_ints = [4]>() v = Constant<value_floats = [0.0, 1.0]>()
      h = OneHot(t, depth, v) c = CastLike(h, x) one = Constant<value_ints = [1]>() u = Unsqueeze(x, one) y = Mul(u, c) }""")
    inner = r"the model at OneHot \(node '' that makes 'h'\), in my::Hot \(node '' that makes 'y'\), in my::Outer \(.*\) \(TypeError: (?!Issues)"
    with pytest.raises(RunError, match=inner):
        exporter.check_gradients(model, order=1)


def _recurrence(kind, direction, **settings):
    """A recurrence of three sequences, whose last output is a state."""
    gates, both = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 2 if direction == "bidirectional" else 1
    drawn = np.random.default_rng(0)
    shapes = {
        "W": (both, gates * 5, 4),
        "R": (both, gates * 5, 5),
        "B": (both, 2 * gates * 5),
        "h": (both, 3, 5),
        "c": (both, 3, 5),
        "P": (both, 15),
    }
    weights = {name: drawn.standard_normal(shape).astype(np.float32) / 2 for name, shape in shapes.items()}
    taken = ["W", "R", "B", "lens", "h", *(["c", "P"] if kind == "LSTM" else [])]
    node = onnx.helper.make_node(kind, ["x", *taken], ["y", "last"], hidden_size=5, direction=direction, **settings)
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, [6, 3, 4]), onnx.helper.make_tensor_value_info("lens", 6, [3])],
        [onnx.helper.make_tensor_value_info("y", 1, None), onnx.helper.make_tensor_value_info("last", 1, None)],
        [onnx.numpy_helper.from_array(weights[name], name) for name in taken if name != "lens"],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 14)], ir_version=8)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("lengths", [[6, 2, 4], [0, 3, 6]])
def test_sequences_are_as_long_as_they_say(kind, direction, lengths):
    settings = {"activations": ["Tanh", "Tanh"]} if (kind, direction) == ("RNN", "bidirectional") else {}
    model, x = _recurrence(kind, direction, **settings), np.random.default_rng(1).standard_normal((6, 3, 4)).astype(np.float32)
    feeds = {"x": x, "lens": np.array(lengths, np.int32)}
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    for one, other in zip(wanted, MendedEvaluator(model).run(None, feeds), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)
    if direction == "forward" and min(lengths):  # onnxruntime gives zeros for a state of nothing
        assert exporter.check_gradients(model, order=1, inputs={"lens": feeds["lens"]}) < 1e-5


@pytest.mark.parametrize(("kind", "settings"), [("LSTM", {"activations": ["Sigmoid", "Relu", "Tanh"]}), ("GRU", {"clip": 0.5})])
def test_what_onnxs_evaluator_ignores_is_said(kind, settings):
    with pytest.raises(RunError, match=f"cannot run the model at {kind} .*it ignores {next(iter(settings))}"):
        exporter.check_gradients(_recurrence(kind, "forward", **settings), order=1, inputs={"lens": np.array([6, 6, 6], np.int32)})


@pytest.mark.parametrize(("opset", "mode"), [(16, "bilinear"), (20, "linear"), (22, "cubic")])
def test_places_of_a_grid_are_in_double(opset, mode):
    text = f"""<ir_version: 8, opset_import: ["": {opset}]> g (float[2,3,8,8] x, float[2,3,3,2] grid) => (float[2,3,3,3] y)
        {{ y = GridSample <mode = "{mode}", padding_mode = "border"> (x, grid) }}"""
    assert exporter.check_gradients(onnx.parser.parse_model(text), order=1) < 1e-4


def test_functions_may_stand_in_any_order():
    text = """<ir_version: 10, opset_import: ["": 20, "my": 1]> g (float[3] x) => (float[3] y) { y = my.A(x) }
    <domain: "my", opset_import: ["": 20, "my": 1]> A (x) => (y) { h = my.B(x) y = my.C(h) }
    <domain: "my", opset_import: ["": 20]> B (x) => (y) { y = Tanh(x) }
    <domain: "my", opset_import: ["": 20, "my": 1]> C (x) => (y) { h = my.B(x) y = Exp(h) }"""
    assert exporter.check_gradients(onnx.parser.parse_model(text), order=1) < 1e-6
    model = onnx.parser.parse_model(text)
    x = np.float32([0.1, 0.2, 0.3])
    np.testing.assert_allclose(exporter.reference_evaluator(model).run(None, {"x": x})[0], np.exp(np.tanh(np.tanh(x))), rtol=1e-6)
