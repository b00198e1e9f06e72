"""Values whose type ONNX does not infer, and tensors inside of optionals and sequences: a gradient that passes them is right, or refused by name."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from exporter.gradient_graph.build import build_gradient_graph
from symbolics.errors import ArgumentError, UnsupportedOperatorError
from tests.symbolics.gradients.tools import run

GET = {
    "h": "",
    "optional": "z = OptionalGetElement(o)",
    "sequence": "k = Constant<value_int = 0>() z = SequenceAt(o, k)",
    "both": "inner = OptionalGetElement(o) k = Constant<value_int = 0>() z = SequenceAt(inner, k)",
}
#: What makes ``o`` of the tensor ``a``, and how a tensor ``z`` comes out of it.
MAKERS = {
    "Optional": ("o = Optional(a)", GET["optional"]),
    "Identity of an Optional": ("p = Optional(a) o = Identity(p)", GET["optional"]),
    "sequence": ("o = SequenceConstruct(a, a)", GET["sequence"]),
    "SplitToSequence": ("len = Constant<value_int = 3>() o = SplitToSequence(a, len)", GET["sequence"]),
    "Optional of a sequence": ("s = SequenceConstruct(a, a) o = Optional(s)", GET["both"]),
    "com.microsoft": ("z = com.microsoft.Gelu(a)", ""),
}
LOOP = "body = b (int64 i, bool g0, float[3] s) => (bool g1, float[3] n) { g1 = Identity(g0)"
#: What reads it. ``GET`` stands before ``z`` is read; the name ``s`` is that of a value outside, too.
READERS = {
    "nothing around": "GET y = Mul(z, u)",
    "If": "y = If(c) <then_branch = t () => (float[3] q) { GET q = Mul(z, u) }, else_branch = e () => (float[3] r) { r = Identity(a) }>",
    "Loop": f"y = Loop(m, c, u) <{LOOP} GET n = Mul(s, z) }}>",
    "Scan": "v = Unsqueeze(u, zero) w = Scan<num_scan_inputs=1, body = b (float[3] s) => (float[3] n) { GET n = Mul(s, z) }>(v) y = Squeeze(w, zero)",
    "If in a Loop": f"y = Loop(m, c, u) <{LOOP} n = If(c) <then_branch = t () => (float[3] q) {{ GET q = Mul(z, s) }}, else_branch = e () => (float[3] r) {{ r = Identity(s) }}> }}>",
    "state of no type": "GET y = Loop(m, c, z) <body = b (int64 i, bool g0, s) => (bool g1, n) { g1 = Identity(g0) n = Mul(s, u) }>",
    "scanned": "GET v = Unsqueeze(z, zero) w = Scan<num_scan_inputs=1, body = b (float[3] s) => (float[3] n) { n = Mul(s, u) }>(v) y = Squeeze(w, zero)",
}


def model(maker: str, get: str, reader: str) -> onnx.ModelProto:
    body = reader.replace("GET", "" if "z =" in maker else get)
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]> g (float[3] x, bool c) => (float[3] y)
        <float[3] u = {{1.0, 2.0, 3.0}}, int64 m = {{2}}, int64[1] zero = {{0}}> {{ a = Mul(x, u) {maker} {body} }}"""
    )


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_gradient_behind_such_a_value(maker, reader):
    proto = model(*MAKERS[maker], READERS[reader])
    if maker == "com.microsoft":
        with pytest.raises(UnsupportedOperatorError, match="Gelu"):
            build_gradient_graph(proto, wrt=["x"])
        return
    x, g = np.array([0.3, -0.4, 0.7], np.float32), np.array([1, 0.5, -0.25], np.float32)
    training = build_gradient_graph(proto, wrt=["x"])
    for c in (np.array(True), np.array(False)):
        at = lambda x, c=c: run(training, {"x": x, "c": c, "y_grad": g})  # noqa: E731
        steps = 1e-2 * np.eye(3, dtype=np.float32)
        differences = [(at(x + d)["y"] - at(x - d)["y"]) @ g / 2e-2 for d in steps]
        np.testing.assert_allclose(at(x)["x_grad"], differences, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kind", ["optional(float[3])", "seq(float[3])"])
def test_what_is_no_tensor_is_neither_differentiated_nor_differentiated_by(kind):
    get, make = (GET["optional"], "o = Optional(z)") if kind[0] == "o" else (GET["sequence"], "o = SequenceConstruct(z)")
    head = '<ir_version: 10, opset_import: ["": 20]> g'
    read = onnx.parser.parse_model(f"{head} ({kind} o, float[3] u) => (float[3] y) {{ {get} y = Mul(z, u) }}")
    made = onnx.parser.parse_model(f"{head} (float[3] x) => ({kind} o, float[3] y) {{ z = Exp(x) {make} y = Mul(z, x) }}")
    assert [v.name for v in build_gradient_graph(read).graph.outputs] == ["y", "u_grad"]
    graph = build_gradient_graph(made).graph
    assert [v.name for v in graph.inputs] == ["x", "y_grad"]
    onnx.checker.check_model(ir.to_proto(build_gradient_graph(made)), full_check=True)
    with pytest.raises(ArgumentError, match="only floating point tensors"):
        build_gradient_graph(read, wrt=["o"])
    with pytest.raises(ArgumentError, match="only floating point tensors"):
        build_gradient_graph(made, outputs=["o"])


def test_an_equation_that_does_not_fit_the_ranks():
    """onnx.checker lets it pass without an inference of shapes."""
    text = '<ir_version: 10, opset_import: ["" : 20]> m (float[2,4,2,4] x, float[4,3] w) => (float[] y) { r = Einsum<equation = "ij,jk->ik">(x, w) y = ReduceSum<keepdims = 0>(r) }'
    with pytest.raises(UnsupportedOperatorError, match="does not fit the ranks of the inputs"):
        build_gradient_graph(onnx.parser.parse_model(text))


#: How ``t`` comes to ``u``, of which the product needs the rank; acme::Foo makes ``t``.
BEHIND = {
    "at once": "u = Identity(t)",
    "behind others": "v = Tanh(t) u = Mul(v, v)",
}


@pytest.mark.parametrize("way", BEHIND)
def test_an_operator_that_no_inference_passes_is_named(way):
    text = f"""<ir_version: 10, opset_import: ["": 20, "acme": 1]> g (float[2,3] x) => (float[2,4] y)
        <float[3,4] w = {{1,2,3,4,5,6,7,8,9,10,11,12}}TYPES> {{ t = acme.Foo(x) {BEHIND[way]} y = MatMul(u, w) }}"""
    named = r"acme::Foo \(node '' that makes 't'\)\. Give acme::Foo a function body in the file, or write the shape of 't' into the graph's value_info"
    with pytest.raises(
        UnsupportedOperatorError, match=rf"no gradient for MatMul .* the rank of 'u' is not known, as ONNX has no inference for {named}"
    ):
        build_gradient_graph(onnx.parser.parse_model(text.replace("TYPES", "")), wrt=["w"])
    training = build_gradient_graph(onnx.parser.parse_model(text.replace("TYPES", ", float[2,3] t")), wrt=["w"])
    assert "w_grad" in [output.name for output in training.graph.outputs]
    body = '<domain: "acme", opset_import: ["": 20]> Foo (a) => (b) { b = Relu(a) }'
    build_gradient_graph(onnx.parser.parse_model(text.replace("TYPES", "") + body), wrt=["x", "w"])
