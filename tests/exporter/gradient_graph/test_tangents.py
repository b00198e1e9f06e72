"""The contract of build_tangent_graph: names, defaults, boundary, marks, errors; and tangents beside eager's."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import exporter
from exporter.files.inspect import inspect_model
from exporter.gradient_graph.build import build_gradient_graph
from exporter.gradient_graph.tangents import build_tangent_graph
from symbolics.errors import ArgumentError, ExportError, FormatError, UnsupportedOperatorError
from symbolics.gradients import RULES, Rule
from symbolics.gradients.tangents import PLACEHOLDER
from symbolics.graph.walk import walk
from symbolics.node.dialects import to_dialect
from symbolics.node.metadata import read_pairing, read_state, read_tangents, tangents_of
from symbolics.node.names import GRADIENTS_KEY, PYTHON_OP, PYTHON_OP_TANGENT, TANGENTS_KEY
from tests.exporter.gradient_graph.test_build import WEIGHTS, names, parse
from tests.exporter.runtime.build import forward, record
from tests.symbolics.gradients.test_control_flow import _around
from tests.symbolics.gradients.test_linked import SIGNATURE, linked
from tests.zoo import forward_mode as zoo

ALLOW = ["tests.zoo.forward_mode:*"]


def run(graph: ir.Model, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    """All outputs by onnxruntime; the checker and onnx.reference agree."""
    proto = ir.to_proto(graph)
    onnx.checker.check_model(proto, full_check=True)
    found = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    for value, other in zip(found, ReferenceEvaluator(proto).run(None, feeds), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-5)
    return dict(zip(names(graph.graph.outputs), found, strict=True))


X, V, W = np.array([0.5, -1.0], np.float32), np.array([3.0, 4.0], np.float32), np.array([5.0, 6.0], np.float32)


# ------------------------------------------------------------------------------------------------------------ boundary
def test_inputs_outputs_and_metadata():
    graph = build_tangent_graph(parse("y = Mul(x, w)", weights=WEIGHTS))
    assert names(graph.graph.inputs) == ["x", "w_tangent", "x_tangent"]
    assert names(graph.graph.outputs) == ["y", "y_tangent"]
    pairing = read_tangents(graph.metadata_props)
    assert pairing == tangents_of(graph)
    assert (pairing.inputs, pairing.outputs, pairing.unreached) == ({"w": "w_tangent", "x": "x_tangent"}, {"y": "y_tangent"}, ())
    assert GRADIENTS_KEY not in graph.metadata_props
    found = run(graph, x=X, w_tangent=W, x_tangent=V)
    np.testing.assert_allclose(found["y_tangent"], V * [1, 2] + X * W)


def test_the_model_that_is_given_stays():
    model = ir.from_proto(parse("y = Mul(x, w)", weights=WEIGHTS))
    before = ir.to_proto(model).SerializeToString()
    build_tangent_graph(model)
    assert ir.to_proto(model).SerializeToString() == before


def test_names_that_clash():
    """x is input and output; y_tangent is taken: the metadata alone says what is what."""
    model = parse("y_tangent = Neg(x) y = Mul(x, y_tangent)", outputs="float[2] y, float[2] x")
    graph = build_tangent_graph(model)
    pairing = tangents_of(graph)
    assert (pairing.inputs, pairing.outputs) == ({"x": "x_tangent_in"}, {"y": "y_tangent_out", "x": "x_tangent_out"})
    found = dict(zip(names(graph.graph.outputs), ReferenceEvaluator(ir.to_proto(graph)).run(None, {"x": X, "x_tangent_in": V})))
    np.testing.assert_allclose(found["y_tangent_out"], -2 * X * V)
    np.testing.assert_allclose(found["x_tangent_out"], V)


def test_a_tangent_graph_has_one_too():
    """Forward over forward: the second derivative along two directions."""
    first = build_tangent_graph(parse("y = Sin(x)"))
    second = build_tangent_graph(first, wrt=["x"], outputs=["y_tangent"])
    assert tangents_of(second).outputs == {"y_tangent": "y_tangent_tangent"}
    found = run(second, x=X, x_tangent=V, **{tangents_of(second).inputs["x"]: W})
    np.testing.assert_allclose(found["y_tangent_tangent"], -np.sin(X) * V * W, rtol=1e-5)


def test_hessian_vector_product():
    """Forward over reverse."""
    training = build_gradient_graph(
        parse("s = Sin(x) t = Mul(s, w) y = ReduceSum<keepdims=0>(t)", outputs="float y", weights=WEIGHTS), wrt=["x"]
    )
    graph = build_tangent_graph(training, wrt=["x"], outputs=["x_grad"])
    assert read_pairing(graph.metadata_props) == read_pairing(training.metadata_props)
    found = run(graph, x=X, y_grad=np.array(1, np.float32), x_tangent=V)
    np.testing.assert_allclose(found["x_grad_tangent"], -np.sin(X) * [1, 2] * V, rtol=1e-5)


def test_outputs_that_nothing_reaches_are_zeros():
    model = parse("y = Sin(x) z = Neg(w) k = Shape(x)", outputs="float[2] y, float[2] z, int64[1] k", weights=WEIGHTS)
    for outputs in (None, ["y", "z"]):
        graph = build_tangent_graph(model, wrt=["x"], outputs=outputs)
        assert (tangents_of(graph).outputs, tangents_of(graph).unreached) == ({"y": "y_tangent", "z": "z_tangent"}, ("z",))
        found = run(graph, x=X, x_tangent=V)
        np.testing.assert_array_equal(found["z_tangent"], np.zeros(2))
        np.testing.assert_allclose(found["y_tangent"], np.cos(X) * V, rtol=1e-6)


def test_what_moves_and_reaches_nothing():
    graph = build_tangent_graph(parse("y = Sin(x)", weights=WEIGHTS), wrt=["x", "w"])
    assert names(graph.graph.inputs) == ["x", "x_tangent", "w_tangent"]
    np.testing.assert_allclose(run(graph, x=X, x_tangent=V, w_tangent=W)["y_tangent"], np.cos(X) * V, rtol=1e-6)


def test_an_output_that_is_an_input_or_a_weight():
    graph = build_tangent_graph(parse("z = Neg(x)", outputs="float[2] x, float[2] z"), wrt=["x"])
    pairing = tangents_of(graph)
    found = dict(zip(names(graph.graph.outputs), ReferenceEvaluator(ir.to_proto(graph)).run(None, {"x": X, pairing.inputs["x"]: V})))
    np.testing.assert_array_equal(found[pairing.outputs["x"]], V)
    np.testing.assert_array_equal(found[pairing.outputs["z"]], -V)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wrt": ["nobody"]}, "no such input"),
        ({"outputs": ["nobody"]}, "no such output"),
        ({"wrt": ["i"]}, "only floating point"),
        ({"wrt": "x"}, "list of names"),
    ],
)
def test_names_that_do_not_fit(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        build_tangent_graph(parse("y = Mul(x, w)", weights=WEIGHTS), **arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "with the keys inputs, outputs, unreached"),
        ('{"inputs":{"nobody":"x_tangent"},"outputs":{"y":"y_tangent"},"unreached":[]}', "names the input or initializer 'nobody'"),
        ('{"inputs":{"x":"x_tangent"},"outputs":{"y":"nobody"},"unreached":[]}', "names the output 'nobody'"),
        ('{"inputs":{"x":"x_tangent"},"outputs":{"y":"y_tangent"},"unreached":["z"]}', "names the tangent 'z'"),
        ('{"inputs":{"x":"x_tangent","w":"x_tangent"},"outputs":{"y":"y_tangent"},"unreached":[]}', "'x_tangent' twice"),
        ('{"inputs":{},"outputs":{"y":"y_tangent","y_tangent":"y"},"unreached":[]}', "without an output of its own"),
    ],
)
def test_a_damaged_pairing(text, message):
    graph = build_tangent_graph(parse("y = Mul(x, w)", weights=WEIGHTS))
    graph.metadata_props[TANGENTS_KEY] = text
    with pytest.raises(FormatError, match=message):
        tangents_of(graph)
    with pytest.raises(FormatError, match=message):
        inspect_model(graph)


# ---------------------------------------------------------------------------------------------------------- operators
def test_an_operator_without_a_rule_is_named():
    model = parse("y = my.domain.Odd(x)", domains=', "my.domain": 1')
    with pytest.raises(UnsupportedOperatorError, match=r"my.domain::Odd.*no rule"):
        build_tangent_graph(model)


def test_a_rule_whose_nodes_have_none_is_named():
    def odd(op, g, x):
        return op.node("Odder", [g, x], domain="my.domain")

    model = parse("y = my.domain.Odd(x)", domains=', "my.domain": 1')
    RULES["my.domain", "Odd"] = Rule(odd)
    try:
        with pytest.raises(UnsupportedOperatorError, match=r"no forward-mode derivative.*my.domain::Odder"):
            build_tangent_graph(model)
    finally:
        del RULES["my.domain", "Odd"]


def test_no_tangent_passes_a_mark():
    class Stops(torch.nn.Module):
        def forward(self, x):
            return x.sin() + x.detach() * 3

    x, v = torch.randn(3), torch.randn(3)
    graph = build_tangent_graph(exporter.export(Stops(), (x,)))
    _, expected = torch.func.jvp(Stops(), (x,), (v,))
    torch.testing.assert_close(expected, x.cos() * v)
    name = graph.graph.inputs[0].name
    np.testing.assert_allclose(list(run(graph, **{name: x.numpy(), f"{name}_tangent": v.numpy()}).values())[1], expected, rtol=1e-5)


def test_symbolic_dims():
    model = parse("h = MatMul(x, w) y = Softmax(h)", "float[n, 2] x", "float[n, 3] y", weights="<float[2, 3] w = {1, 2, 3, 4, 5, 6}>")
    graph = build_tangent_graph(model)
    w = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    for n in (1, 4):
        x, v, d = (np.random.default_rng(k).normal(size=s).astype(np.float32) for k, s in ((0, (n, 2)), (1, (n, 2)), (2, (2, 3))))
        expected = torch.func.jvp(lambda x, w: (x @ w).softmax(-1), (torch.tensor(x), torch.tensor(w)), (torch.tensor(v), torch.tensor(d)))[
            1
        ]
        np.testing.assert_allclose(run(graph, x=x, x_tangent=v, w_tangent=d)["y_tangent"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "norm"), [("float16", True), ("float16", False), ("bfloat16", False)])
def test_numbers_of_16_bits(kind, norm):
    """onnxruntime has no kernels for bfloat16, and onnx.reference does not compute the statistics of a norm in float32."""
    last = "LayerNormalization<axis = -1>(e, x)" if norm else "Softmax(e)"
    model = parse(f"h = Mul(x, x) e = Exp(h) y = {last}", f"{kind}[4] x", f"{kind}[4] y")
    proto = ir.to_proto(build_tangent_graph(model))
    dtype = ir.DataType[kind.upper()].numpy()
    x, v = np.array([0.5, -0.3, 0.2, 0.9]).astype(dtype), np.array([1.0, 2.0, -1.0, 0.5]).astype(dtype)
    session = onnxruntime.InferenceSession(proto.SerializeToString()) if kind == "float16" else ReferenceEvaluator(proto)
    _, tangent = session.run(None, {"x": x, "x_tangent": v})
    assert tangent.dtype == dtype

    def f(x):
        e = (x * x).exp()
        return torch.nn.functional.layer_norm(e, (4,), weight=x) if norm else e.softmax(-1)

    expected = torch.func.jvp(f, (torch.tensor(x.astype(np.float64)),), (torch.tensor(v.astype(np.float64)),))[1]
    np.testing.assert_allclose(tangent.astype(np.float64), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.relu(x),
        lambda x: x.abs(),
        lambda x: torch.maximum(x, torch.zeros_like(x)),
        lambda x: x.clamp(-1, 1),
        lambda x: x.amax(-1),
        lambda x: x.max(-1).values,
        lambda x: x.sort(-1).values,
        lambda x: torch.nn.functional.hardtanh(x),
        lambda x: x.sqrt(),
        lambda x: x.norm(),
        lambda x: x.round() * x,
        lambda x: torch.where(x > 0, x, x * 0.1),
    ],
    ids="relu abs maximum clamp amax max sort hardtanh sqrt norm round where".split(),
)
def test_ties_and_kinks_are_those_of_the_gradient(function):
    """At ties, u (J v) is (J' u) v of the same model, whose conventions are eager's."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return function(x)

    x = torch.tensor([[0.0, 0.0, 1.0, 1.0], [-1.0, 2.0, 2.0, 0.0]])
    program = exporter.export(Model(), (x,))
    graph, training = build_tangent_graph(program), build_gradient_graph(program)
    name, y = graph.graph.inputs[0].name, training.graph.outputs[0].name
    v = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    proto = ir.to_proto(graph).SerializeToString()
    result, tangent = onnxruntime.InferenceSession(proto).run(None, {name: x.numpy(), f"{name}_tangent": v})
    u = np.random.default_rng(1).normal(size=result.shape).astype(np.float32)
    proto = ir.to_proto(training).SerializeToString()
    (g,) = onnxruntime.InferenceSession(proto).run([f"{name}_grad"], {name: x.numpy(), f"{y}_grad": u})
    usable = np.isfinite(g)
    if usable.all():
        np.testing.assert_allclose((tangent * u).sum(), (g * v).sum(), rtol=1e-4, atol=1e-5)
    else:
        assert not np.isfinite(tangent).all()


# -------------------------------------------------------------------------------------------------------- control flow
@pytest.mark.parametrize("body", ["Loop", "Scan", "If"])
def test_control_flow(body):
    text = {
        "Loop": "n = Constant<value_int=3>() t = Constant<value_int=1>() c = Cast<to=9>(t) y = Loop(n, c, x) <body = b (int64 i, bool k, float[2] s) => (bool q, float[2] r) { q = Identity(k) p = Mul(s, w) r = Sin(p) }>",
        "Scan": "y, z = Scan<num_scan_inputs=1, body = b (float[2] s, float[2] e) => (float[2] r, float[2] o) { p = Mul(s, w) r = Add(p, e) o = Sin(r) }>(x, w2)",
        "If": "m = ReduceSum<keepdims=0>(x) o = Constant<value_float=0.0>() c = Greater(m, o) y = If(c) <then_branch = a () => (float[2] r) { r = Mul(x, w) }, else_branch = b () => (float[2] r2) { r2 = Exp(x) }>",
    }[body]
    outputs = "float[2] y" + (", float[3, 2] z" if body == "Scan" else "")
    weights = "<float[2] w = {0.5, 2.0}, float[3, 2] w2 = {1, 2, 3, 4, 5, 6}>"
    model = parse(text, outputs=outputs, weights=weights)
    wrt = ["x", "w"]
    graph = build_tangent_graph(model, wrt=wrt)
    assert not any(node.domain == PLACEHOLDER for node in walk(graph.graph))
    w = torch.tensor([0.5, 2.0])

    def eager(x, w):
        if body == "Loop":
            for _ in range(3):
                x = (x * w).sin()
            return (x,)
        if body == "If":
            return (x * w if x.sum() > 0 else x.exp(),)
        rows = []
        for e in torch.arange(1, 7.0).reshape(3, 2):
            x = x * w + e
            rows.append(x.sin())
        return x, torch.stack(rows)

    for x in (X, -X):
        expected = torch.func.jvp(eager, (torch.tensor(x), w), (torch.tensor(V), torch.tensor(W)))[1]
        found = run(graph, x=x, x_tangent=V, w_tangent=W)
        for name, tangent in zip(("y", "z"), expected):
            np.testing.assert_allclose(found[f"{name}_tangent"], tangent, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["Loop", "Scan", "If"])
def test_a_python_op_in_a_body(kind):
    """It runs again with tangents, once an iteration, on what the iteration read."""
    model = _around(kind)
    for node in (n for outer in model.graph.node for a in outer.attribute if a.HasField("g") for n in a.g.node):
        for attribute in node.attribute:
            if attribute.name == "name":
                attribute.s = b"tests.zoo.forward_mode:OwnSlope"  # y = 2 x, y' = 7 x'
    graph = build_tangent_graph(model, wrt=["x", "w"])
    rng = np.random.default_rng(0)
    feeds = {"x": rng.uniform(1, 2, 4), "w": rng.uniform(1, 2, 4), "x_tangent": rng.uniform(1, 2, 4), "w_tangent": rng.uniform(1, 2, 4)}
    feeds |= {"z": rng.uniform(1, 2, (3, 4))} if kind == "Scan" else {}
    feeds = {k: v.astype(np.float32) for k, v in feeds.items()}
    x, t = feeds["x"], feeds["x_tangent"]
    for k in range(1 if kind == "If" else 3):
        x, t = x * feeds["w"], t * feeds["w"] + x * feeds["w_tangent"]
        x, t = 2 * x + (feeds["z"][k] if kind == "Scan" else 0), 7 * t
    for session in (exporter.inference_session(graph, ALLOW), exporter.reference_evaluator(graph, ALLOW)):
        y, tangent = session.run(None, feeds)
        np.testing.assert_allclose(y, x, rtol=1e-5)
        np.testing.assert_allclose(tangent, t, rtol=1e-5)
        assert len(session.store) == 0


# ------------------------------------------------------------------------------------------------ Functions of a file
def test_functions_with_their_own_backward():
    """The tangent is that of the link's backward, 100 exp(x) x v, and not of the body."""
    graph = build_tangent_graph(linked(SIGNATURE, "float[2] y, float[2] z", "y, z, e = own.f(x, n)"), wrt=["x"])
    found = run(graph, x=X, n=np.array([2, 3]), x_tangent=V)
    np.testing.assert_allclose(found["y_tangent"], 100 * np.exp(X) * X * V, rtol=1e-5)
    np.testing.assert_allclose(found["z_tangent"], -V, rtol=1e-5)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_portable_files(dynamo):
    """A jvp of the Function is not in the file: its backward is, 5 where the jvp says 7."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return zoo.OwnSlope.apply(x.sin()) + zoo.SavesForForward.apply(x, x)

    x, v = torch.randn(3), torch.randn(3)
    graph = build_tangent_graph(exporter.export(Model(), (x,), dynamo=dynamo, portable=True))
    name = graph.graph.inputs[0].name
    tangent = list(run(graph, **{name: x.numpy(), f"{name}_tangent": v.numpy()}).values())[1]
    np.testing.assert_allclose(tangent, 5 * x.cos() * v + v * (x.cos() * x + x.sin()), rtol=1e-4, atol=1e-5)


def with_python_op():
    class Model(torch.nn.Module):
        def forward(self, x):
            return zoo.SavesForForward.apply(x.sin(), x)

    return exporter.export(Model(), (torch.randn(3),))


def test_gradients_of_a_python_op_with_tangents_are_refused():
    with pytest.raises(UnsupportedOperatorError, match="SavesForForward"):
        build_gradient_graph(build_tangent_graph(with_python_op()))


def test_a_training_graph_keeps_its_context():
    """The PythonOp stays where its PythonOpGrad reads the context."""
    program = with_python_op()
    training = build_gradient_graph(program)
    y = training.graph.outputs[0].name
    graph = build_tangent_graph(training, outputs=[y])
    kinds = [node.op_type for node in graph.graph]
    assert kinds.count(PYTHON_OP) == kinds.count(PYTHON_OP_TANGENT) == kinds.count("PythonOpGrad") == 1
    x, v, u = (np.random.default_rng(k).normal(size=3).astype(np.float32) for k in range(3))
    name = graph.graph.inputs[0].name
    session = exporter.inference_session(graph, ALLOW)
    found = dict(
        zip(
            names(graph.graph.outputs),
            session.run(None, {name: x, f"{y}_grad": u, **{t: v if n == name else u for n, t in tangents_of(graph).inputs.items()}}),
        )
    )
    slope = np.cos(x) * np.cos(np.sin(x)) * x + np.sin(np.sin(x))
    np.testing.assert_allclose(found[f"{y}_tangent"], slope * v, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[f"{name}_grad"], slope * u, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [exporter.inference_session, exporter.reference_evaluator])
def test_forward_over_reverse_through_a_python_op(make):
    """A product with the Hessian, which stops at detach() as eager does; every context is freed."""

    class Model(torch.nn.Module):
        def forward(self, x):
            y = zoo.WithSetupContext.apply(x.sin(), 3) * x.detach()
            return y.exp().sum() + (x * zoo.WithSetupContext.apply(x, 3)).sum()

    model, x, v = Model(), torch.randn(4), torch.randn(4)
    training = build_gradient_graph(exporter.export(model, (x,), input_names=["x"], output_names=["y"]), wrt=["x"])
    runner = make(build_tangent_graph(training, wrt=["x"], outputs=["x_grad"]), ALLOW)
    (product,) = runner.run(["x_grad_tangent"], {"x": x.numpy(), "x_tangent": v.numpy(), "y_grad": np.ones((), np.float32)})
    np.testing.assert_allclose(product, torch.autograd.functional.hvp(model, x, v)[1], rtol=1e-4, atol=1e-4)
    assert not runner.store.contexts


def test_a_context_that_the_graph_gives_out():
    x = torch.randn(3, requires_grad=True)
    graph = build_tangent_graph(forward(record(zoo.OwnSlope, x), context=True), wrt=["x0"])
    assert [node.op_type for node in graph.graph] == [PYTHON_OP, PYTHON_OP_TANGENT]
    session = exporter.inference_session(graph, ALLOW)
    y, context, tangent = session.run(None, {"x0": x.detach().numpy(), "x0_tangent": np.ones(3, np.float32)})
    np.testing.assert_allclose(tangent, np.full(3, 7))
    assert int(context) in session.store.contexts


def test_inspect_and_dialects():
    graph = build_tangent_graph(with_python_op())
    facts = inspect_model(graph)
    assert facts.tangents and not facts.training
    (row,) = facts.rows
    assert (row.kind, row.error, row.function) == ("PythonOpTangent", None, "tests.zoo.forward_mode:SavesForForward")
    assert len(row.inputs) == 2 and len(row.outputs) == 1 and row.outputs[0].startswith("float[3]")
    with pytest.raises(ExportError, match="is a PythonOpTangent, which schema='documented' cannot say.*save without schema="):
        to_dialect(graph, "documented")


def test_two_builds_are_the_same_bytes():
    program = with_python_op()
    assert len({ir.to_proto(build_tangent_graph(program)).SerializeToString() for _ in range(2)}) == 1


# --------------------------------------------------------------------------------------------------------------- models
def test_a_transformer_has_at_most_three_times_the_nodes():
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=50, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False
    )
    config._attn_implementation = "eager"

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.GPT2LMHeadModel(config)

        def forward(self, x):
            return self.model(x).logits

    model, x = Logits().eval(), torch.randint(0, 50, (2, 8))
    program = exporter.export(copy.deepcopy(model), (x,))
    graph = build_tangent_graph(program)
    assert len(list(graph.graph.all_nodes())) <= 3 * len(list(program.model.graph.all_nodes()))
    parameters = {k: p.detach() for k, p in model.named_parameters()}
    moves = {k: torch.randn_like(p) * 0.1 for k, p in parameters.items()}
    names_of = {e.initializer: k for k, e in read_state(graph.metadata_props).items() if k in parameters}
    feeds = {program.model.graph.inputs[0].name: x.numpy()} | {t: moves[names_of[n]].numpy() for n, t in tangents_of(graph).inputs.items()}
    y, tangent = onnxruntime.InferenceSession(ir.to_proto(graph).SerializeToString()).run(None, feeds)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.func.jvp(lambda p: torch.func.functional_call(model, p, (x,)), (parameters,), (moves,))
    np.testing.assert_allclose(y, expected[0].detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(tangent, expected[1].detach(), rtol=1e-3, atol=1e-4)
