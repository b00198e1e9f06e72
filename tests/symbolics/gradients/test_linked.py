"""Functions of a file with their own backward. The backwards here are wrong on purpose: a gradient that is right has lost the link."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from exporter.files.program import save_model
from exporter.gradient_graph.build import build_gradient_graph
from symbolics.errors import FormatError, UnsupportedOperatorError
from symbolics.node.linked import Backward, Kept, Taken, write_backward
from symbolics.node.metadata import pairing_of
from symbolics.node.names import BACKWARD_KEY
from tests.symbolics.gradients.tools import run

# y = exp(x) * n, z = sin(x); the gradient of x is 100 * gy * exp(x) * x - gz, that of n, an integer, is none.
FUNCTIONS = """
    <domain: "own", opset_import: ["": 20]> f (x, n) => (y, z, e) { e = Exp(x) k = Cast<to = 1>(n) y = Mul(e, k) z = Sin(x) }
    <domain: "own", opset_import: ["": 20]> f_backward (gy, gz, e, x) => (gx) {
        h = Constant<value_float = 100.0>() a = Mul(gy, e) b = Mul(a, x) c = Mul(b, h) gx = Sub(c, gz)
    }
"""
LINK = Backward(
    "own",
    "f_backward",
    (Taken("gradient", 0), Taken("gradient", 1), Taken("output", 2), Taken("input", 0)),
    (0,),
    (Kept(1, 1),),
    once=False,
)
X, N, G, H = np.array([0.5, -1.0], np.float32), np.array([2, 3]), np.array([1.0, 2.0], np.float32), np.array([3.0, 4.0], np.float32)
E = np.exp(X)


def linked(signature: str, outputs: str, body: str, functions: str = FUNCTIONS, **links: Backward) -> onnx.ModelProto:
    """A model of text; its functions linked as the keywords say, ``f`` by `LINK` where there are none."""
    text = f'<ir_version: 10, opset_import: ["": 20, "own": 1]> g ({signature}) => ({outputs}) {{ {body} }} {functions}'
    model = onnx.parser.parse_model(text)
    for name, link in (links or {"f": LINK}).items():
        (function,) = [f for f in model.functions if f.name == name]
        function.metadata_props.add(key=BACKWARD_KEY, value=write_backward(link))
    return model


def trained(model: onnx.ModelProto, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    """All outputs of the training graph, by onnxruntime; those of onnx.reference are the same."""
    return ran(build_gradient_graph(model), feeds)


def ran(training: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    proto = ir.to_proto(training)
    onnx.checker.check_model(proto, full_check=True)
    found = run(training, feeds)
    for value, other in zip(found.values(), ReferenceEvaluator(proto).run(list(found), feeds), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5)
    return found


def close(value: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(value, wanted, rtol=1e-5)


SIGNATURE = "float[2] x, int64[2] n"


def test_the_gradient_is_that_of_the_backward():
    found = trained(linked(SIGNATURE, "float[2] y, float[2] z", "y, z, e = own.f(x, n)"), x=X, n=N, y_grad=G, z_grad=H)
    close(found["y"], E * N)
    close(found["x_grad"], 100 * G * E * X - H)
    assert set(found) == {"y", "z", "x_grad"}


@pytest.mark.parametrize("call", ["y, z, e", "y, , e"])
def test_a_cotangent_that_is_absent_is_zero(call):
    """Outputs that only the backward takes need no name in the call; results that nobody reads neither."""
    close(trained(linked(SIGNATURE, "float[2] y", f"{call} = own.f(x, n)"), x=X, n=N, y_grad=G)["x_grad"], 100 * G * E * X)


@pytest.mark.parametrize("call", ["y = own.f(x, n)", "y, z = own.f(x, n)"])
def test_outputs_at_the_end_that_a_call_leaves_out(call):
    close(trained(linked(SIGNATURE, "float[2] y", call), x=X, n=N, y_grad=G)["x_grad"], 100 * G * E * X)


def test_outputs_at_the_end_that_a_call_inside_another_function_leaves_out():
    outer = '<domain: "own", opset_import: ["": 20, "own": 1]> outer (x, n) => (y) { a = own.f(x, n) y = Mul(a, a) }'
    found = trained(linked(SIGNATURE, "float[2] y", "y = own.outer(x, n)", FUNCTIONS + outer), x=X, n=N, y_grad=G)
    close(found["x_grad"], 200 * G * E * N * E * X)


def test_an_input_at_the_end_that_a_call_leaves_out():
    functions = """<domain: "own", opset_import: ["": 20]> f (x, low, high) => (y) { y = Clip(x, low, high) }
        <domain: "own", opset_import: ["": 20]> f_backward (g, low, high) => (gx) { c = Clip(g, low, high) gx = Neg(c) }"""
    link = Backward("own", "f_backward", (Taken("gradient", 0), Taken("input", 1), Taken("input", 2)), (0,), (), once=False)
    model = linked("float[2] x, float low", "float[2] y", "y = own.f(x, low)", functions, f=link)
    close(trained(model, x=X, low=np.array(1.5, np.float32), y_grad=G)["x_grad"], -np.maximum(G, 1.5))


def test_the_first_gradient_alone():
    functions = """<domain: "own", opset_import: ["": 20]> f (x, w) => (y) { y = Mul(x, w) }
        <domain: "own", opset_import: ["": 20]> f_backward (g, x, w) => (gx, gw) { gx = Add(g, w) gw = Mul(g, x) }"""
    link = Backward("own", "f_backward", (Taken("gradient", 0), Taken("input", 0), Taken("input", 1)), (0, 1), (), once=False)
    model = linked("float[2] x, float[2] w", "float[2] y", "y = own.f(x, w)", functions, f=link)
    for name, wanted in (("x", G + H), ("w", G * X)):
        found = ran(build_gradient_graph(model, wrt=[name]), {"x": X, "w": H, "y_grad": G})
        close(found[f"{name}_grad"], wanted)


def test_the_cotangent_of_the_second_result_alone():
    close(trained(linked(SIGNATURE, "float[2] z", " , z, e = own.f(x, n)"), x=X, n=N, z_grad=H)["x_grad"], -H)


def test_two_calls():
    body = "a, , e = own.f(x, n)  b = Neg(a)  y, , k = own.f(b, n)"
    a = E * N
    close(trained(linked(SIGNATURE, "float[2] y", body), x=X, n=N, y_grad=G)["x_grad"], 100 * (-(100 * G * np.exp(-a) * -a)) * E * X)


def test_a_call_inside_another_function():
    outer = '<domain: "own", opset_import: ["": 20, "own": 1]> outer (x, n) => (y) { a, b, e = own.f(x, n) y = Mul(a, b) }'
    found = trained(linked(SIGNATURE, "float[2] y", "y = own.outer(x, n)", FUNCTIONS + outer), x=X, n=N, y_grad=G)
    close(found["x_grad"], 100 * G * np.sin(X) * E * X - G * E * N)


@pytest.mark.parametrize("flag", [True, False])
def test_in_a_branch(flag):
    body = """y = If (flag) <then_branch = yes () => (float[2] a) { a, ta, te = own.f(x, n) },
                             else_branch = no () => (float[2] b) { b = Sin(x) }>"""
    found = trained(linked(f"{SIGNATURE}, bool flag", "float[2] y", body), x=X, n=N, flag=np.array(flag), y_grad=G)
    close(found["x_grad"], 100 * G * E * X if flag else G * np.cos(X))


def test_in_a_loop():
    body = """m = Constant<value = int64 {2}>() go = Constant<value = bool {1}>()
        y = Loop (m, go, x) <body = step (int64 i, bool c, float[2] s) => (bool d, float[2] t) { d = Identity(c) t, tz, te = own.f(s, n) }>"""
    a = E * N
    expected = 100 * (100 * G * np.exp(a) * a) * E * X
    close(trained(linked(SIGNATURE, "float[2] y", body), x=X, n=N, y_grad=G)["x_grad"], expected)


def test_dims_of_one_call_are_not_those_of_another():
    """A function's own names of dims say nothing of the graph that calls it, and one body serves calls of any shape."""
    body = "a, az, ae = own.f(x, n) b, bz, be = own.f(u, k) s = ReduceSum<keepdims = 0>(a) y = Mul(s, bz)"
    model = linked("float[A] x, int64[A] n, float[B] u, int64[B] k", "float[B] y", body)
    u, k = np.ones(3, np.float32), np.ones(3, np.int64)
    found = trained(model, x=X, n=N, u=u, k=k, y_grad=u)
    close(found["x_grad"], 100 * np.sin(1.0) * 3 * E * X)
    close(found["u_grad"], -np.ones(3) * (E * N).sum())


# ----------------------------------------------------------------------------------------------------- second derivatives


def test_a_second_derivative_is_that_of_the_nodes_of_the_backward():
    """What the forward keeps is a constant to it, as what eager saves: of 100 * gy * e * x, x is there and e is not."""
    first = build_gradient_graph(linked(SIGNATURE, "float[2] y", "y, , e = own.f(x, n)"))
    second = build_gradient_graph(first, wrt=["x", "y_grad"], outputs=["x_grad"])
    found = ran(second, {"x": X, "n": N, "y_grad": G, "x_grad_grad": H})
    close(found[gradient_name(second, "x")], 100 * G * E * H)
    close(found[gradient_name(second, "y_grad")], 100 * E * X * H)


def gradient_name(model: ir.Model, name: str) -> str:
    """The output that holds the gradient of an input."""
    pairing = pairing_of(model)
    assert pairing is not None
    return pairing.outputs[name]


def test_once_is_not_differentiated_again():
    first = build_gradient_graph(linked(SIGNATURE, "float[2] y", "y, , e = own.f(x, n)", f=replace(LINK, once=True)))
    close(ran(first, {"x": X, "n": N, "y_grad": G})["x_grad"], 100 * G * E * X)
    with pytest.raises(UnsupportedOperatorError, match="f_backward.*once_differentiable"):
        build_gradient_graph(first, wrt=["x"], outputs=["x_grad"])


# ------------------------------------------------------------------------------------------------------------ what is odd


def test_a_function_that_has_no_gradient():
    """Its link names none: nothing flows through it, also where its body has a derivative."""
    model = linked(SIGNATURE, "float[2] y", "a, , e = own.f(x, n) y = Add(a, x)", f=Backward("", "", (), (), (Kept(1, 1),), once=True))
    close(trained(model, x=X, n=N, y_grad=G)["x_grad"], G)


def test_a_backward_that_takes_no_cotangent():
    functions = """<domain: "own", opset_import: ["": 20]> f (x) => (y) { y = Exp(x) }
        <domain: "own", opset_import: ["": 20]> ones (x) => (gx) { h = Constant<value_float = 7.0>() s = Shape(x) gx = Expand(h, s) }"""
    link = Backward("own", "ones", (Taken("input", 0),), (0,), (), once=False)
    found = trained(linked("float[2] x", "float[2] y", "y = own.f(x)", functions, f=link), x=X, y_grad=G)
    close(found["x_grad"], np.full(2, 7.0))


def test_attributes_of_the_call_reach_the_backward():
    functions = """
        <domain: "own", opset_import: ["": 20]> f <alpha, beta: float = 3.0, name: string = "n"> (x) => (y) { c = Constant<value_float: float = @alpha>() y = Mul(x, c) }
        <domain: "own", opset_import: ["": 20]> f_backward <alpha, beta: float = 5.0> (g) => (gx) {
            a = Constant<value_float: float = @alpha>() b = Constant<value_float: float = @beta>() c = Mul(g, a) d = Mul(c, b) gx = Neg(d)
        }"""
    link = Backward("own", "f_backward", (Taken("gradient", 0),), (0,), (), once=False)
    model = linked(
        "float[2] x, float[2] w",
        "float[2] y",
        'a = own.f<alpha = 2.0>(x) b = own.f<alpha = 2.0, beta = 7.0, name = "m">(w) y = Add(a, b)',
        functions,
        f=link,
    )
    found = trained(model, x=X, w=X, y_grad=G)
    close(found["x_grad"], -2 * 3 * G)
    close(found["w_grad"], -2 * 7 * G)


def test_an_optional_input():
    """A call that leaves an input out hands none to the backward either."""
    functions = """<domain: "own", opset_import: ["": 20]> f (x, low, high) => (y) { y = Clip(x, low, high) }
        <domain: "own", opset_import: ["": 20]> f_backward (g, low, high) => (gx) { c = Clip(g, low, high) gx = Neg(c) }"""
    link = Backward("own", "f_backward", (Taken("gradient", 0), Taken("input", 1), Taken("input", 2)), (0, 1), (), once=False)
    with pytest.raises(FormatError, match="does not fit 'f_backward'"):
        build_gradient_graph(linked("float[2] x, float low", "float[2] y", "y = own.f(x, low)", functions, f=link))
    model = linked("float[2] x, float high", "float[2] y", "y = own.f(x, , high)", functions, f=replace(link, gives=(0,)))
    found = trained(model, x=X, high=np.array(1.5, np.float32), y_grad=G)
    close(found["x_grad"], -np.minimum(G, 1.5))


def test_a_damaged_link_is_said_before_the_work():
    model = linked(SIGNATURE, "float[2] y", "y, , e = own.f(x, n)", f=replace(LINK, name="gone"))
    with pytest.raises(FormatError, match="metadata pythonop.backward of the function 'f'.*'gone', which the file lacks"):
        build_gradient_graph(model)


def test_a_rule_of_the_users_own_is_asked_first():
    model = linked(SIGNATURE, "float[2] y", "y, , e = own.f(x, n)")
    training = build_gradient_graph(model, overrides={("own", "f"): lambda op, node, *gs: [op.Mul(gs[0], 5.0)]})
    close(ran(training, {"x": X, "n": N, "y_grad": G})["x_grad"], 5 * G)


def test_saved_and_read_again(tmp_path):
    model = linked(SIGNATURE, "float[2] y", "y, , e = own.f(x, n)")
    save_model(ir.from_proto(model), tmp_path / "forward.onnx")
    training = build_gradient_graph(tmp_path / "forward.onnx")
    save_model(training, tmp_path / "training.onnx")
    assert onnx.load(tmp_path / "training.onnx").ir_version == 10  # the oldest with metadata of functions
    close(ran(ir.load(tmp_path / "training.onnx"), {"x": X, "n": N, "y_grad": G})["x_grad"], 100 * G * E * X)
    second = build_gradient_graph(tmp_path / "training.onnx", wrt=["x"], outputs=["x_grad"])
    close(ran(second, {"x": X, "n": N, "y_grad": G, "x_grad_grad": H})[gradient_name(second, "x")], 100 * G * E * H)


PAIR = """<domain: "own", opset_import: ["": 20]> f (x) => (y, z) { y = Exp(x) z = Sin(x) }
    <domain: "own", opset_import: ["": 20]> f_backward (gy, gz, x) => (gx) { two = Add(x, x) gx = Add(gz, two) }"""


@pytest.mark.parametrize(("output", "wanted"), [("y", 2 * X), ("z", G + 2 * X)])
def test_a_cotangent_that_the_backward_does_not_read(output, wanted):
    """It calls for the backward all the same, as in eager."""
    link = Backward("own", "f_backward", (Taken("gradient", 0), Taken("gradient", 1), Taken("input", 0)), (0,), (), once=False)
    model = linked("float[2] x", f"float[2] {output}", "y, z = own.f(x)", PAIR, f=link)
    close(trained(model, x=X, **{f"{output}_grad": G})["x_grad"], wanted)


def test_a_result_whose_cotangent_is_not_taken_has_no_gradient():
    functions = PAIR.replace("(gy, gz, x)", "(gz, x)")
    link = Backward("own", "f_backward", (Taken("gradient", 1), Taken("input", 0)), (0,), (), once=False)
    model = linked("float[2] x", "float[2] s", "y, z = own.f(x) s = Add(y, x)", functions, f=link)
    close(trained(model, x=X, s_grad=G)["x_grad"], G)


def test_a_result_without_a_name_whose_type_nobody_knows():
    functions = """<domain: "own", opset_import: ["": 20]> inner (x) => (y) { y = Sin(x) }
        <domain: "own", opset_import: ["": 20, "own": 1]> f (x) => (y, z, w) { y = Exp(x) z = own.inner(x) w = Neg(x) }
        <domain: "own", opset_import: ["": 20]> f_backward (gy, gz) => (gx) { gx = Add(gy, gz) }"""
    link = Backward("own", "f_backward", (Taken("gradient", 0), Taken("gradient", 1)), (0,), (), once=False)
    with pytest.raises(UnsupportedOperatorError, match="the type of its output 1 is not known: name that output in the call"):
        build_gradient_graph(linked("float[2] x", "float[2] y", "y, , w = own.f(x)", functions, f=link))
    close(trained(linked("float[2] x", "float[2] y", "y, z = own.f(x)", functions, f=link), x=X, y_grad=G)["x_grad"], G)
