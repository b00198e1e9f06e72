"""If, Loop and Scan: states, captured values, nesting; and what must run only once."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper as oh
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import exporter
from exporter.gradient_graph.build import build_gradient_graph
from tests.symbolics.gradients.tools import check, gradients, model_of, run

I64 = np.int64

IF = """
    c = Cast<to = 9>(k)
    y = If (c) <
        then_branch = t () => (float[2,3] a) { e = Exp(x) a = Mul(e, w) },
        else_branch = f () => (float[2,3] b) { s = Sin(x) b = Mul(s, s) }
    >
"""
SCAN = """
    h = Constant<value = float[2] {0.1, -0.2}>()
    last, all = Scan <num_scan_inputs = 1, body = step (float[2] s, float[2] v) => (float[2] n, float[2] o) {
        p = Mul(s, w) q = Add(p, v) n = Tanh(q) o = Mul(n, v)
    }> (h, x)
    t = ReduceSum<keepdims = 0>(all)
    y = Mul(last, t)
"""
LOOP = """
    m = Constant<value = int64 {3}>()
    go = Constant<value = bool {1}>()
    last, all = Loop (m, go, x) <body = step (int64 i, bool c, float[2] s) => (bool d, float[2] n, float[2] o) {
        d = Identity(c) f = Cast<to = 1>(i) g = Add(f, w) p = Mul(s, g) n = Sin(p) o = Mul(n, n)
    }>
    t = ReduceSum<keepdims = 0>(all)
    y = Mul(last, t)
"""
NESTED = """
    m = Constant<value = int64 {2}>()
    go = Constant<value = bool {1}>()
    y = Loop (m, go, x) <body = outer (int64 i, bool c, float[2] s) => (bool d, float[2] n) {
        d = Identity(c)
        two = Constant<value = int64 {2}>()
        r = Loop (two, c, s) <body = inner (int64 j, bool cc, float[2] u) => (bool dd, float[2] nn) {
            dd = Identity(cc) z1 = Mul(u, w) nn = Tanh(z1)
        }>
        first = Constant<value = int64 {0}>()
        is = Equal(i, first)
        n = If (is) <then_branch = t () => (float[2] a) { a = Mul(r, s) }, else_branch = f () => (float[2] b) { b = Sin(r) }>
    }>
"""
LOOP_IN_SCAN = """
    y = Scan <num_scan_inputs = 1, body = outer (float[2] v) => (float[2,2] all) {
        m = Constant<value = int64 {2}>()
        go = Constant<value = bool {1}>()
        all = Loop (m, go) <body = inner (int64 j, bool c) => (bool d, float[2] o) { d = Identity(c) p = Mul(v, v) o = Sin(p) }>
    }> (x)
"""


@pytest.mark.parametrize("condition", [0, 1])
def test_if(condition):
    check("float[2,3] x, float[3] w, int64 k", IF, {"k": np.array(condition, I64)})


def test_scan_with_state_outputs_and_captured_values():
    check("float[4,2] x, float[2] w", SCAN)


def test_scan_backwards_and_along_other_axes():
    """The same as the plain Scan of the input transposed and from its end."""
    other = SCAN.replace(
        "num_scan_inputs = 1,", "num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1], scan_output_directions = [1],"
    )
    rng = np.random.default_rng(0)
    feeds = {k: rng.uniform(-1, 1, s).astype(np.float32) for k, s in {"x": (4, 2), "w": (2,), "y_grad": (2,)}.items()}
    plain = gradients("float[4,2] x, float[2] w", SCAN, feeds)
    turned = gradients("float[2,4] x, float[2] w", other, {**feeds, "x": feeds["x"][::-1].T.copy()})
    np.testing.assert_allclose(turned["x_grad"].T[::-1], plain["x_grad"], rtol=1e-5)
    np.testing.assert_allclose(turned["w_grad"], plain["w_grad"], rtol=1e-5)


def test_loop_with_counter_state_and_captured_values():
    check("float[2] x, float[2] w", LOOP)


def test_loop_of_a_loop_and_an_if():
    check("float[2] x, float[2] w", NESTED)


def test_loop_without_states_inside_a_scan_without_states():
    check("float[3,2] x", LOOP_IN_SCAN)


def test_loop_that_never_runs_hands_its_gradient_through():
    body = LOOP.replace("{3}", "{0}").replace("y = Mul(last, t)", "y = Add(last, t)")
    got = gradients(
        "float[2] x, float[2] w", body, {"x": np.ones(2, np.float32), "w": np.ones(2, np.float32), "y_grad": np.ones(2, np.float32)}
    )
    np.testing.assert_allclose(got["x_grad"], [1, 1])
    np.testing.assert_allclose(got["w_grad"], [0, 0])


# ---------------------------------------------------------------------------------------------------- what runs only once
DROPOUT = {
    "If": 'y = If (k) <then_branch = t () => (float[64] a) { p = Mul(x, w) a, m = Dropout(p, ratio, k) }, else_branch = f () => (float[64] b) { b = Mul(x, w) }>',
    "If, no mask": 'y = If (k) <then_branch = t () => (float[64] a) { p = Mul(x, w) a = Dropout(p, ratio, k) }, else_branch = f () => (float[64] b) { b = Mul(x, w) }>',
    "Scan": 'u = Unsqueeze(x, zero) v = Concat<axis = 0>(u, u, u) y = Scan <num_scan_inputs = 1, body = s (float[64] e) => (float[64] a) { p = Mul(e, w) a = Dropout(p, ratio, k) }>(v)',
    "Loop": 'n = Constant<value = int64 {3}>() y = Loop (n, k) <body = s (int64 i, bool c) => (bool d, float[64] a) { d = Identity(c) p = Mul(x, w) a = Dropout(p, ratio, k) }>',
    "Loop in If": """y = If (k) <then_branch = t () => (float[3,64] a) {
            n = Constant<value = int64 {3}>()
            a = Loop (n, k) <body = s (int64 i, bool c) => (bool d, float[64] q) { d = Identity(c) p = Mul(x, w) q = Dropout(p, ratio, k) }>
        }, else_branch = f () => (float[3,64] b) { o = Constant<value_ints = [3, 64]>() r = Mul(x, w) b = Expand(r, o) }>""",
}  # fmt: skip


@pytest.mark.parametrize("where", DROPOUT)
def test_dropout_in_a_body_uses_the_mask_of_the_forward(where):
    """y = x w mask / (1 - p): so the gradient of x is the sum of y / x, whatever the mask was."""
    constants = "ratio = Constant<value = float {0.4}>() zero = Constant<value_ints = [0]>() "
    x = np.random.default_rng(0).uniform(1, 2, 64).astype(np.float32)
    shape = (64,) if where.startswith("If") else (3, 64)
    feeds = {"x": x, "w": np.full(64, 2, np.float32), "k": np.array(True), "y_grad": np.ones(shape, np.float32)}
    training = build_gradient_graph(model_of("float[64] x, float[64] w, bool k", constants + DROPOUT[where]))
    got = run(training, feeds)
    kept = got["y"].reshape(-1, 64)
    assert 0.3 < (kept != 0).mean() < 0.9
    np.testing.assert_allclose(got["x_grad"], kept.sum(0) / x, rtol=1e-5)
    np.testing.assert_allclose(got["w_grad"], kept.sum(0) / 2, rtol=1e-5)
    assert sum(n.op_type == "Dropout" for n in ir.traversal.RecursiveGraphIterator(training.graph)) == 1


def test_random_numbers_in_a_loop_are_drawn_once():
    body = """n = Constant<value = int64 {5}>() g = Constant<value = bool {1}>()
        y = Loop (n, g) <body = s (int64 i, bool c) => (bool d, float[8] a) { d = Identity(c) r = RandomUniformLike(x) a = Mul(x, r) }>"""
    x = np.linspace(1, 2, 8).astype(np.float32)
    got = run(build_gradient_graph(model_of("float[8] x", body)), {"x": x, "y_grad": np.ones((5, 8), np.float32)})
    np.testing.assert_allclose(got["x_grad"], got["y"].sum(0) / x, rtol=1e-5)


CALLS: list[str] = []
CONTEXTS: dict[int, tuple] = {}


class PythonOp(OpRun):
    """A stochastic Function: y = x * r, a new r at each call."""

    op_domain = "com.microsoft"

    def _run(self, x, **_):
        CALLS.append("forward")
        handle, r = len(CALLS), np.random.default_rng(len(CALLS)).uniform(1, 2)
        CONTEXTS[handle] = r
        return np.array(handle, np.int64), (x * r).astype(x.dtype)


class PythonOpGrad(OpRun):
    op_domain = "com.microsoft"

    def _run(self, context, g, y, **_):
        CALLS.append("backward")
        return ((g * CONTEXTS.pop(int(np.ravel(context)[0]))).astype(g.dtype),)  # one backward a context


def _python_op(x: str, y: str) -> onnx.NodeProto:
    """The node's own name and its attribute ``name`` differ, which oh.make_node cannot say."""
    node = oh.make_node("PythonOp", [x], ["", y], domain="com.microsoft")
    attributes = {
        "name": "tests:Noise", "input_convention": "d", "input_requires_grads": [1], "input_tensor_types": [1], "input_tensor_ranks": [1],
        "output_tensor_types": [1], "output_tensor_ranks": [1], "output_tensor_requires_grads": [1], "inplace": 0, "training_mode": 1,
    }  # fmt: skip
    node.attribute.extend(oh.make_attribute(k, v) for k, v in attributes.items())
    return node


def _around(kind: str) -> onnx.ModelProto:
    """A model with one PythonOp in the body of a Loop, Scan or If."""
    value = lambda name, *dims: oh.make_tensor_value_info(name, TensorProto.FLOAT, dims)  # noqa: E731
    flag = oh.make_tensor_value_info("c", TensorProto.BOOL, [])
    inner = [oh.make_node("Mul", ["s", "w"], ["p"]), _python_op("p", "n")]
    nodes = [oh.make_node("Constant", [], ["count"], value_int=3), oh.make_node("Cast", ["count"], ["go"], to=TensorProto.BOOL)]
    if kind == "Loop":
        counter = oh.make_tensor_value_info("i", TensorProto.INT64, [])
        out_flag = oh.make_tensor_value_info("d", TensorProto.BOOL, [])
        body = oh.make_graph(
            [*inner, oh.make_node("Identity", ["c"], ["d"])], "body", [counter, flag, value("s", 4)], [out_flag, value("n", 4)]
        )
        nodes.append(oh.make_node("Loop", ["count", "go", "x"], ["y"], body=body))
    elif kind == "Scan":
        body = oh.make_graph([*inner, oh.make_node("Add", ["n", "v"], ["m"])], "body", [value("s", 4), value("v", 4)], [value("m", 4)])
        nodes.append(oh.make_node("Scan", ["x", "z"], ["y"], body=body, num_scan_inputs=1))
    else:
        then = oh.make_graph([oh.make_node("Mul", ["x", "w"], ["p"]), _python_op("p", "n")], "then", [], [value("n", 4)])
        other = oh.make_graph([oh.make_node("Mul", ["x", "x"], ["e"])], "else", [], [value("e", 4)])
        nodes.append(oh.make_node("If", ["go"], ["y"], then_branch=then, else_branch=other))
    inputs = [value("x", 4), value("w", 4)] + ([value("z", 3, 4)] if kind == "Scan" else [])
    graph = oh.make_graph(nodes, "model", inputs, [value("y", 4)])
    return oh.make_model(graph, opset_imports=[oh.make_opsetid("", 20), oh.make_opsetid("com.microsoft", 1)], ir_version=9)


@pytest.mark.parametrize("kind", ["Loop", "Scan", "If"])
def test_a_python_op_in_a_body_is_called_once_an_iteration(kind):
    """The gradient of x is that of the forward's own draws, and no context serves twice."""
    training = build_gradient_graph(_around(kind))
    CALLS.clear(), CONTEXTS.clear()
    rng = np.random.default_rng(1)
    feeds = {"x": rng.uniform(1, 2, 4), "w": rng.uniform(1, 2, 4), "y_grad": rng.uniform(1, 2, 4)}
    if kind == "Scan":
        feeds["z"] = rng.uniform(1, 2, (3, 4))
    feeds = {k: v.astype(np.float32) for k, v in feeds.items()}
    evaluator = ReferenceEvaluator(ir.to_proto(training), new_ops=[PythonOp, PythonOpGrad])
    got = dict(zip([o.name for o in training.graph.outputs], evaluator.run(None, feeds)))
    times = 1 if kind == "If" else 3
    assert (CALLS.count("forward"), CALLS.count("backward")) == (times, times)
    assert not CONTEXTS
    draws = [np.random.default_rng(k + 1).uniform(1, 2) for k in range(times)]
    factor = np.prod(draws) * feeds["w"] ** times
    np.testing.assert_allclose(got["x_grad"], feeds["y_grad"] * factor, rtol=1e-4)
    if kind != "Scan":
        np.testing.assert_allclose(got["w_grad"], feeds["y_grad"] * factor * times * feeds["x"] / feeds["w"], rtol=1e-4)


def test_a_python_op_in_a_loop_in_an_if_leaves_both_bodies():
    inner = _around("Loop")
    then = oh.make_graph(list(inner.graph.node), "then", [], [oh.make_tensor_value_info("y", TensorProto.FLOAT, [4])])
    other = oh.make_graph([oh.make_node("Mul", ["x", "w"], ["e"])], "else", [], [oh.make_tensor_value_info("e", TensorProto.FLOAT, [4])])
    graph = oh.make_graph(
        [oh.make_node("If", ["k"], ["out"], then_branch=then, else_branch=other)], "model",
        [*inner.graph.input, oh.make_tensor_value_info("k", TensorProto.BOOL, [])], [oh.make_tensor_value_info("out", TensorProto.FLOAT, [4])],
    )  # fmt: skip
    training = build_gradient_graph(oh.make_model(graph, opset_imports=list(inner.opset_import), ir_version=9))
    CALLS.clear(), CONTEXTS.clear()
    feeds = {"x": np.ones(4, np.float32), "w": np.ones(4, np.float32), "k": np.array(True), "out_grad": np.ones(4, np.float32)}
    evaluator = ReferenceEvaluator(ir.to_proto(training), new_ops=[PythonOp, PythonOpGrad])
    got = dict(zip([o.name for o in training.graph.outputs], evaluator.run(None, feeds)))
    assert (CALLS.count("forward"), CALLS.count("backward")) == (3, 3)
    assert not CONTEXTS
    np.testing.assert_allclose(
        got["x_grad"], np.full(4, np.prod([np.random.default_rng(k + 1).uniform(1, 2) for k in range(3)])), rtol=1e-4
    )


def test_states_that_nobody_uses_run_no_backward():
    """Two final states are read by nobody: the slope of their root is without end, and nothing but NaN would come of zeros."""
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[3] x, float[3] c, float[3] e) => (float[3] y) {
      n = Constant<value = int64 {3}>()
      t = Constant<value = bool {1}>()
      z = Sub(x, x)
      y, s, u = Loop (n, t, x, z, z) <body = b (int64 i, bool k, float[3] a, float[3] r, float[3] q) => (bool k2, float[3] a2, float[3] r2, float[3] q2)
        { k2 = Identity(k) a2 = Mul(a, c) r1 = Mul(r, e) r2 = Sqrt(r1) q2 = Add(q, r2) } >
    }"""
    training = build_gradient_graph(onnx.parser.parse_model(text))
    backward = [node for node in training.graph if node.op_type == "Loop"][-1]
    assert not any(node.op_type == "Sqrt" for node in backward.attributes["body"].as_graph())
    x, c = np.array([1, 2, 3], np.float32), np.array([2, 1, 3], np.float32)
    feeds = {"x": x, "c": c, "e": c, "y_grad": np.ones(3, np.float32)}
    results = dict(
        zip([value.name for value in training.graph.outputs], ReferenceEvaluator(ir.to_proto(training)).run(None, feeds), strict=True)
    )
    np.testing.assert_allclose(results["x_grad"], c**3, rtol=1e-5)
    np.testing.assert_allclose(results["c_grad"], 3 * c**2 * x, rtol=1e-5)
    np.testing.assert_array_equal(results["e_grad"], 0)


@pytest.mark.parametrize("size", ["5", "N"])
def test_what_runs_once_in_a_branch_that_some_iterations_take(size):
    """The Dropout of the second iteration alone, of ratio 0: the others give out a mask of that shape, too, or onnxruntime could not stack them."""
    body = f"""
        n = Constant<value = int64 {{3}}>() ratio = Constant<value = float {{0.0}}>()
        y = Loop (n, k, x) <body = b (int64 i, bool c, float[{size}] s) => (bool d, float[{size}] out) {{
            d = Identity(c) one = Constant<value = int64 {{1}}>() second = Equal(i, one)
            out = If (second) <
                then_branch = t () => (float[{size}] a) {{ p = Mul(s, w) a, mask = Dropout(p, ratio, k) }},
                else_branch = f () => (float[{size}] e) {{ e = Mul(s, s) }}>
        }}>
    """
    x, w = np.linspace(0.5, 1.5, 5).astype(np.float32), np.linspace(-1, 1, 5).astype(np.float32)
    got = gradients(
        f"float[{size}] x, float[{size}] w, bool k", body, {"x": x, "w": w, "k": np.array(True), "y_grad": np.ones(5, np.float32)}
    )
    np.testing.assert_allclose(got["y"], x**4 * w**2, rtol=1e-5)
    np.testing.assert_allclose(got["x_grad"], 4 * x**3 * w**2, rtol=1e-5)
    np.testing.assert_allclose(got["w_grad"], 2 * x**4 * w, rtol=1e-5)


def test_values_that_grow_from_round_to_round_run_without_a_gradient():
    text = (
        "t = Constant<value = bool {1}>() n = Constant<value = int64 {3}>() y = Loop(n, t, x)"
        "<body = b (int64 i, bool c, float[P,2] s) => (bool c2, float[Q,2] s2) { c2 = Identity(c) u = Mul(s, w) s2 = Concat<axis = 0>(u, w) }>"
    )
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> g (float[1,2] x, float[1,2] w) => (float[N,2] y) {{ {text} }}'
    )
    module, x, w = exporter.load(model), torch.ones(1, 2), torch.full((1, 2), 2.0, requires_grad=True)
    with torch.no_grad():
        assert module(x, w)[:, 0].tolist() == [8.0, 8.0, 4.0, 2.0]
    with pytest.raises(
        exporter.RunError,
        match=r"without a gradient \(torch.no_grad\(\)\) the file runs; to train it, write the loop with values of one shape",
    ):
        module(x, w)
