"""The forms that keep training graphs small and fast: each is right, and is the one that is written."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
import torch

import exporter
from exporter.gradient_graph.build import build_gradient_graph
from symbolics.graph.walk import unread
from tests.exporter.gradient_graph.test_build import parse
from tests.processes import python
from tests.symbolics.gradients.tools import check, model_of, run

LSTM = """
    time = Shape<start = 1, end = 2>(x)
    ones = Constant<value_ints = [1]>()
    hidden = Constant<value_ints = [3]>()
    size = Concat<axis = 0>(ones, time, hidden)
    zero = Constant<value_float = 0.0>()
    start = Expand(zero, size)
    nobody = Add(x, x)
    y, h, c = LSTM<hidden_size = 3>(x, w, r, , , start)
"""


def test_what_only_a_replaced_node_has_read_goes_with_it():
    """An LSTM becomes a Scan: what made its initial zeros is nobody's then, and what nobody read before stays."""
    shapes = {"x": (5, 2, 4), "w": (1, 12, 4), "r": (1, 12, 3)}
    inputs = ", ".join(f"float[{', '.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    source = parse(LSTM, inputs, "float[5,1,2,3] y", weights="<int64[2] alone = {1, 2}>")
    made = build_gradient_graph(source)
    left = unread(made.graph)
    assert {value.name for each in left for value in (each.outputs if isinstance(each, ir.Node) else [each])} == {"nobody", "alone"}
    assert "Expand" not in {node.op_type for node in made.graph if not node.name.startswith("grad")}
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape).astype("f") for name, shape in shapes.items()}
    expected = run(ir.from_proto(source), feeds)["y"]
    np.testing.assert_allclose(run(made, {**feeds, "y_grad": np.ones_like(expected)})["y"], expected, atol=1e-6)


ATTENTION = """
    s = Constant<value_float = 0.5>()
    a = Mul(q, s)
    t = Transpose<perm = [0, 1, 3, 2]>(k)
    b = Mul(t, s)
    p = MatMul(a, b)
    m = Add(p, mask)
    w = Softmax<axis = -1>(m)
    y = MatMul(w, v)
"""
HEADS = "float[2,3,4,5] q, float[2,3,6,5] k, float[2,3,6,7] v"
GELU = """
    three = Constant<value_float = 3.0>()
    c = Constant<value_float = 0.7978845608>()
    k = Constant<value_float = 0.044715>()
    one = Constant<value_float = 1.0>()
    half = Constant<value_float = 0.5>()
    h = Mul(x, half)
    cube = Pow(x, three)
    scaled = Mul(cube, k)
    inner = Add(x, scaled)
    u = Mul(inner, c)
    t = Tanh(u)
    o = Add(t, one)
    y = Mul(h, o)
"""


def backward_of(model: ir.Model) -> Counter[str]:
    """The operators that the gradient graph adds."""
    return Counter(n.op_type for n in model.graph if n.name.startswith("grad/"))


def values(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


# -------------------------------------------------------------------------------------------------------------- weights
@pytest.mark.parametrize("x", ["float[n, 4] x", "float[2, n, 4] x"])
def test_the_gradient_of_a_linear_layers_weight_is_one_product(x):
    y = x.replace("4]", "3]").replace(" x", " y")
    model = parse("t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t)", x, y, weights="<float[3, 4] w = {1,2,3,4,5,6,7,8,9,10,11,12}>")
    training = build_gradient_graph(model, wrt=["w"])
    written = backward_of(training)
    assert written["Transpose"] == 0 and written["MatMul"] == 0 and written["Gemm"] == 1
    shape = (0, 4) if "2" not in x else (2, 0, 4)
    for feed in (np.zeros(shape, np.float32), values(x=(3, 4) if len(shape) == 2 else (2, 3, 4))["x"]):
        g = np.random.default_rng(1).standard_normal((*feed.shape[:-1], 3)).astype(np.float32)
        found = run(training, {"x": feed, "y_grad": g}, ["w_grad"])["w_grad"]
        np.testing.assert_allclose(found, g.reshape(-1, 3).T @ feed.reshape(-1, 4), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------ attention
def test_attention_in_parts_has_the_closed_form():
    feeds = values(q=(2, 3, 4, 5), k=(2, 3, 6, 5), v=(2, 3, 6, 7), mask=(4, 6))
    check(f"{HEADS}, float[4,6] mask", ATTENTION, feeds, wrt=["q", "k", "v"], order=1)
    training = build_gradient_graph(model_of(f"{HEADS}, float[4,6] mask", ATTENTION), wrt=["q", "k", "v"])
    written = backward_of(training)
    assert written["MatMul"] == 4 and written["Mul"] == 3  # the scale once, on g
    sums = [n for n in training.graph if n.op_type == "ReduceSum"]
    assert [list(n.inputs[0].producer().inputs[1].shape)[-1] for n in sums] == [7]  # over the width of a head


def test_attention_whose_mask_is_trained_keeps_the_rules_of_its_parts():
    feeds = values(q=(2, 3, 4, 5), k=(2, 3, 6, 5), v=(2, 3, 6, 7), mask=(4, 6))
    check(f"{HEADS}, float[4,6] mask", ATTENTION, feeds, order=1)


def test_attention_with_probabilities_as_an_output():
    body = ATTENTION + "z = Identity(w)"
    check(f"{HEADS}, float[4,6] mask", body, values(q=(2, 3, 4, 5), k=(2, 3, 6, 5), v=(2, 3, 6, 7), mask=(4, 6)), order=1)


def test_attention_with_heads_that_broadcast():
    signature = "float[2,3,4,5] q, float[1,3,6,5] k, float[2,3,6,7] v, float[4,6] mask"
    check(signature, ATTENTION, values(q=(2, 3, 4, 5), k=(1, 3, 6, 5), v=(2, 3, 6, 7), mask=(4, 6)), order=1)


@pytest.mark.parametrize(
    "body", ["t = Transpose<perm = [0, 2, 1]>(x) s = MatMul(x, t)", "s = MatMul(x, x)", "k = Mul(x, x) s = MatMul(k, x)"]
)
def test_attention_of_a_tensor_to_itself(body):
    check("float[2,4,4] x", f"{body} w = Softmax(s) y = MatMul(w, x)", values(x=(2, 4, 4)), order=1)


# ----------------------------------------------------------------------------------------------------------------- GELU
def test_gelu_in_parts_has_the_closed_form():
    check("float[5] x", GELU, {"x": np.float32([-6.0, -0.7, 0.0, 1.3, 5.0])})
    written = backward_of(build_gradient_graph(model_of("float[5] x", GELU)))
    assert not written["Pow"] and written.total() == 8


def test_gelu_whose_tanh_is_an_output_too():
    check("float[5] x", GELU + "z = Exp(t)", {"x": np.float32([-2.0, -0.7, 0.1, 1.3, 2.0])})


def test_a_gelu_that_a_body_begins_outside_of_it():
    """The half is made outside, the rest in the branch: each graph has its own sweep."""
    body = GELU.replace(
        "y = Mul(h, o)",
        "on = Greater(half, k)\n y = If(on) <then_branch = a () => (float[5] p) { p = Mul(h, o) }, else_branch = b () => (float[5] n) { n = Add(h, o) }>",
    )
    check("float[5] x", body, {"x": np.float32([-2.0, -0.7, 0.1, 1.3, 2.0])}, order=1)


# --------------------------------------------------------------------------------------------------------- LSTM and GRU
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU], ids=["LSTM", "GRU"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_plain_recurrences_equal_eager(bidirectional, batch_first, kind):
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrence = kind(3, 4, num_layers=2, bidirectional=bidirectional, batch_first=batch_first)

        def forward(self, x, h, *c):
            y, last = self.recurrence(x, (h, *c) if c else h)
            return (y, last[0].sin(), last[1].cos()) if c else (y, last.sin())

    layers, states = 4 if bidirectional else 2, 2 if kind is torch.nn.LSTM else 1
    args = (torch.randn(5, 2, 3), *(torch.randn(layers, 5 if batch_first else 2, 4) for _ in range(states)))
    model = Model()
    program = exporter.export(model, args)
    training = build_gradient_graph(program)
    assert not any(n.op_type == "Loop" for n in training.graph)  # the backward is a Scan of its own
    for a in args:
        a.requires_grad_()
    outputs = model(*args)
    seeds = [torch.randn_like(o) for o in outputs]
    torch.autograd.backward(outputs, seeds)
    expected = [*(p.grad for p in model.parameters()), *(a.grad for a in args)]
    names = [*(n for n, _ in model.named_parameters()), *(v.name for v in program.model.graph.inputs)]
    feeds = {v.name: a.detach().numpy() for v, a in zip(program.model.graph.inputs, args)}
    feeds |= {f"{v.name}_grad": s.numpy() for v, s in zip(program.model.graph.outputs, seeds)}
    session = exporter.inference_session(training)
    found = session.run([f"{n}_grad" for n in names], feeds)
    for name, g, e in zip(names, found, expected):
        np.testing.assert_allclose(g, e.numpy(), rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("operator", ["GRU", "LSTM"])
def test_a_recurrence_in_a_branch_that_is_not_taken(operator):
    gates = 3 if operator == "GRU" else 4
    call = f"{operator}<hidden_size = 6>(x, w, r)"
    branches = f"""on = Constant<value = bool {{1}}>()
        y = If(on) <then_branch = a () => (float[5, 1, 3, 6] p) {{ p, q = {call} }}, else_branch = b () => (float[5, 1, 3, 6] m) {{ m, n = {call} }}>"""
    shapes = {"x": (5, 3, 4), "w": (1, gates * 6, 4), "r": (1, gates * 6, 6)}
    signature, given = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items()), values(**shapes)
    given["y_grad"] = values(y=(5, 1, 3, 6))["y"]
    expected, found = (run(build_gradient_graph(model_of(signature, body)), given) for body in (f"y, n = {call}", branches))
    for name in ("x_grad", "w_grad", "r_grad"):
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize("way", ["forward", "bidirectional"])
@pytest.mark.parametrize(("operator", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4), ("LSTM with peepholes", 4)])
def test_a_clip_bounds_what_onnxruntime_bounds(operator, gates, way):
    """Of an LSTM the gates, not the cell that the last function sees: here it begins far outside."""
    name, *more = operator.split(" with ")
    d = 2 if way == "bidirectional" else 1
    shapes = {"x": (5, 3, 4), "w": (d, gates * 6, 4), "r": (d, gates * 6, 6), "b": (d, 2 * gates * 6), "h": (d, 3, 6)}
    shapes |= {"c": (d, 3, 6)} if name == "LSTM" else {}
    shapes |= {"p": (d, 18)} if more else {}
    feeds = {key: array * 2 for key, array in values(**shapes).items()}
    body = f'y, z = {name}<hidden_size = 6, clip = 0.7, direction = "{way}">(x, w, r, b, "", {", ".join([*shapes][4:])})'
    signature = ", ".join(f"float[{','.join(map(str, shape))}] {key}" for key, shape in shapes.items())
    model = model_of(signature, body)
    plain = run(ir.from_proto(model), feeds)
    found = run(build_gradient_graph(model), feeds | {f"{name}_grad": np.ones_like(value) for name, value in plain.items()})
    for output, value in plain.items():
        np.testing.assert_allclose(found[output], value, rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------- Conv
@pytest.mark.parametrize("channels", [3, 20, 50])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 1}, {"stride": (2, 3), "padding": (0, 2)}],
    ids=["plain", "strides", "dilations", "unequal"],
)
@pytest.mark.parametrize("rank", [1, 2])
def test_conv_weight_gradient_equals_eager(channels, options, rank):
    torch.manual_seed(0)
    if rank == 1:
        options = {k: v[0] if isinstance(v, tuple) else v for k, v in options.items()}
    conv = (torch.nn.Conv1d if rank == 1 else torch.nn.Conv2d)(channels, 6, 3, **options)
    x = torch.randn(2, channels, *[9, 11][:rank])
    program = exporter.export(conv, (x,))
    y = conv(x)
    g = torch.randn_like(y)
    y.backward(g)
    (out,) = program.model.graph.outputs
    session = exporter.inference_session(build_gradient_graph(program, wrt=["weight", "bias"]))
    found = session.run(["weight_grad", "bias_grad"], {program.model.graph.inputs[0].name: x.numpy(), f"{out.name}_grad": g.numpy()})
    np.testing.assert_allclose(found[0], conv.weight.grad.numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[1], conv.bias.grad.numpy(), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------- shapes and counts
def test_dims_that_were_computed_from_shapes_need_no_sum_found_at_run_time():
    body = """
        i0 = Constant<value_ints = [0]>()
        i1 = Constant<value_ints = [1]>()
        i2 = Constant<value_ints = [2]>()
        whole = Shape(x)
        b = Slice(whole, i0, i1)
        t = Slice(whole, i1, i2)
        shape = Concat<axis = 0>(b, t, i1)
        r = Reshape(x, shape)
        y = Add(r, w)
    """
    training = build_gradient_graph(model_of('float["b","t"] x, float["b","t",1] w', body))
    assert not backward_of(training)["NonZero"]
    check('float["b","t"] x, float["b","t",1] w', body, values(x=(2, 3), w=(2, 3, 1)), order=1)


@pytest.mark.slow
def test_gpt2_has_at_most_2_6_nodes_for_one_of_the_forward():
    from benchmarks.gradient_graph import gpt2

    model = gpt2(12)
    assert len(build_gradient_graph(model).graph) / len(model.graph) <= 2.6


_CLAIM = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (4 * 10**9,) * 2)
import onnx
import exporter
model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 20]>
    g (float[rows] x) => (float[rows] z) <float[2147483648] y> {
        y = Relu(x)
        n = Size(y)
        m = Cast<to = 1>(n)
        z = Mul(y, m)
    }''')
exporter.build_gradient_graph(model)
"""


def test_a_size_that_a_file_only_claims_takes_no_memory():
    done = python("-c", _CLAIM, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-1000:]


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU], ids=["LSTM", "GRU"])
def test_lengths_that_a_foreign_file_declares_behind_a_recurrence(kind):
    """torch.onnx alone declares the example's length where the length is open."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrence = kind(3, 4, batch_first=True)

        def forward(self, x):
            return self.recurrence(x)[0].relu()

    model, shapes = Model(), {"x": {0: torch.export.Dim("b"), 1: torch.export.Dim("t")}}
    proto = exporter.export(model, (torch.randn(3, 5, 3),), dynamic_shapes=shapes).model_proto
    del proto.metadata_props[:]
    for value in (*proto.graph.output, *proto.graph.value_info):
        dims = value.type.tensor_type.shape.dim
        for dim in (dim for dim in dims if dim.dim_param == "t" and dims[-1].dim_value == 4):  # the features behind the recurrence
            dim.dim_value = 5
    x, y = (torch.linspace(-1, 1, 42).reshape(2, 7, 3).requires_grad_() for _ in range(2))
    (exporter.load(proto)(x) ** 2).sum().backward()
    (model(y) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_a_size_that_a_foreign_file_declares_of_an_open_axis():
    training = build_gradient_graph(parse("y = Relu(x)", "float[n,3] x", "float[5,3] y"), wrt=["x"])
    assert [value.shape for value in training.graph.inputs if value.name == "y_grad"] == [["n", 3]]
