"""Forms for WebGPU, on the CPU: the same numbers as before, and what WebGPU has no kernels for is gone. tests/exporter/training/test_webgpu.py runs them there."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exporter
from exporter.runtime.narrow import narrow_integers
from exporter.runtime.provider_forms import write_file, write_forms
from symbolics.errors import ArgumentError
from symbolics.graph.walk import walk

F32 = np.float32


def _run(proto, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feeds)


def _written(text, gone, feeds, *, opset=21, **near):
    """Written by forms, a model gives what it gave, and has none of the operators any more."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {text}')
    model = ir.from_proto(proto)
    assert write_forms(["webgpu"], model)
    made = ir.to_proto(model)
    onnx.checker.check_model(made, full_check=True)
    assert not {node.op_type for node in walk(model.graph)} & set(gone)
    assert not write_forms(["webgpu"], model), "once is enough"
    for wanted, got in zip(_run(proto, feeds), _run(made, feeds), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, **{"rtol": 1e-6, "atol": 1e-7, **near})


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_logarithms_of_softmax(axis):
    x = np.array([[1e4, -1e4, 3], [0, 0, 0], [-np.inf, 1, 2], [88, 89, 90]], F32)
    _written(f"(float[4,3] x) => (float[4,3] y) {{ y = LogSoftmax <axis = {axis}> (x) }}", {"LogSoftmax"}, {"x": x})


def test_sums_and_means_of_several():
    feeds = {
        name: np.random.default_rng(at).standard_normal(shape).astype(F32) for at, (name, shape) in enumerate((("a", (4, 3)), ("b", 3)))
    }
    text = (
        "(float[4,3] a, float[3] b) => (float[4,3] y, float[4,3] z, float[4,3] w) { y = Sum (a, b, a, b) z = Mean (a, b, b) w = Sum (a) }"
    )
    _written(text, {"Sum", "Mean"}, feeds)


def test_signs_and_whole_numbers():
    x = np.array([-2.5, -1.5, -0.5, 0, 0.5, 1.5, 2.5, 0.49999997, 8388609, -3.2, np.nan], F32)
    _written("(float[11] x) => (float[11] y, float[11] z) { y = Sign (x) z = Round (x) }", {"Sign", "Round"}, {"x": x})


def test_tensors_of_one_number():
    text = """(float[N,3] x) => (float[N,3] y, bool[N,3] z, int64[N,3] w) { s = Shape (x) y = ConstantOfShape <value = float[1] {2}> (s)
        z = ConstantOfShape <value = bool[1] {1}> (s) w = ConstantOfShape <value = int64[1] {5}> (s) }"""
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}'))
    write_forms(["webgpu"], model)
    assert [node.op_type for node in model.graph].count("ConstantOfShape") == 1, "one of int64 is a shape"
    y, z, w = _run(ir.to_proto(model), {"x": np.zeros((2, 3), F32)})
    assert (y.tolist(), z.tolist(), w.tolist()) == ([[2.0] * 3] * 2, [[True] * 3] * 2, [[5] * 3] * 2)


def test_booleans_that_are_moved_and_compared():
    a, b = np.array([[1, 0, 1], [0, 0, 1]], bool), np.array([[1, 1, 0], [0, 1, 1]], bool)
    text = """(bool[2,3] a, bool[2,3] b) => (bool[2,3] o, bool[2,3] x, bool[2,3] e, bool[4,3] c, bool[2,1] s, bool[3,2] t, bool[6] r, bool[2,3] n, bool p, bool q)
        <int64[1] one = {1}, int64[1] two = {2}, int64[1] flat = {-1}, int64[2] sizes = {1, 1}> {
            o = Or (a, b) x = Xor (a, b) e = Equal (a, b) c = Concat <axis = 0> (a, b) s = Slice (a, one, two, one) t = Transpose (a)
            r = Reshape (a, flat) n = Not (b) v = Slice (r, one, two) p = Squeeze (v) u, w = Split <axis = 0> (v, zeros) q = Squeeze (u)
        }""".replace("int64[2] sizes = {1, 1}", "int64[2] zeros = {1, 0}")
    _written(text, {"Or", "Xor"}, {"a": a, "b": b})


@pytest.mark.parametrize(("momentum", "shape"), [(0.0, (4, 3, 5, 2)), (0.9, (4, 3)), (0.7, (4, 3, 2))])
def test_batches_normalized(momentum, shape):
    rng = np.random.default_rng(0)
    feeds = {"x": (rng.standard_normal(shape) * 3 + 50).astype(F32)} | {name: rng.random(3).astype(F32) + 0.5 for name in "sbmv"}
    size = ",".join(map(str, shape))
    text = f"""(float[{size}] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[{size}] y, float[3] rm, float[3] rv) {{
        y, rm, rv = BatchNormalization <training_mode = 1, momentum = {momentum}, epsilon = 0.00001> (x, s, b, m, v) }}"""
    _written(text, {"BatchNormalization"}, feeds, rtol=1e-4, atol=1e-5)
    x = feeds["x"].astype(np.float64)
    axes = tuple(axis for axis in range(len(shape)) if axis != 1)
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}'))
    write_forms(["webgpu"], model)
    y, rm, rv = _run(ir.to_proto(model), feeds)
    np.testing.assert_allclose(rm, feeds["m"] * momentum + x.mean(axes) * (1 - momentum), rtol=1e-5)
    np.testing.assert_allclose(rv, feeds["v"] * momentum + x.var(axes) * (1 - momentum), rtol=1e-5)
    wide = (1, 3, *[1] * (len(shape) - 2))
    expected = (x - x.mean(axes).reshape(wide)) / np.sqrt(x.var(axes).reshape(wide) + 1e-5) * feeds["s"].reshape(wide) + feeds["b"].reshape(
        wide
    )
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("channels", "outputs", "kernel", "group", "padded"),
    [
        (6, 8, 3, 1, 8),
        (9, 4, 2, 1, 12),
        (15, 4, 3, 1, 16),
        (3, 8, 3, 1, 3),
        (12, 8, 3, 1, 12),
        (6, 6, 3, 1, 6),
        (6, 8, 1, 1, 6),
        (18, 8, 3, 2, 9),
    ],
)
@pytest.mark.parametrize("spatial", [1, 2])
def test_channels_in_fours(channels, outputs, kernel, group, padded, spatial):
    size, window = ",".join(["7"] * spatial), ",".join([str(kernel)] * spatial)
    text = f"""(float[n,{channels},{size}] x, float[{outputs},{channels // group},{window}] w, float[{outputs}] b) => (float[n,{outputs},{",".join("p" * spatial)}] y)
        {{ y = Conv <group = {group}, pads = [{",".join(["1", "0"] * spatial)}]> (x, w, b) }}"""
    rng = np.random.default_rng(0)
    shapes = {"x": (5, channels, *[7] * spatial), "w": (outputs, channels // group, *[kernel] * spatial), "b": (outputs,)}
    feeds = {name: rng.standard_normal(shape).astype(F32) for name, shape in shapes.items()}
    if padded != channels // group:
        _written(text, (), feeds, rtol=1e-5, atol=1e-5)
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}'))
    assert write_forms(["webgpu"], model) == (padded != channels // group)


def test_remainders_by_division():
    """Also of negative numbers, and of the smallest."""
    x = np.array([0, 1, 4095, 4096, 2**24 + 5, 2**31 - 1, -1, -4096, -(2**31), -(2**31) + 1, 123456789, -987654321], np.int32)[:, None]
    text = """(int32[12,1] x) => (int32[12,4] y) <int32[4] m = {4095, 16773120, 2130706432, 1}> { y = BitwiseAnd (x, m) }"""
    _written(text, {"BitwiseAnd"}, {"x": x})
    text = """(int32[12,1] x) => (int32[12,2] y, int32[12,1] z) <int32[2] m = {7, 4096}, int32 n = {2}> { y = Mod (x, m) z = Mod (x, n) }"""
    _written(text, {"Mod"}, {"x": x})
    for masks in ("{5, 7}", "{0, 1}", "{-1, 1}"):
        text = f'<ir_version: 10, opset_import: ["": 21]> g (int32[2] x) => (int32[2] y) <int32[2] m = {masks}> {{ y = BitwiseAnd (x, m) }}'
        assert not write_forms(["webgpu"], ir.from_proto(onnx.parser.parse_model(text))), masks


def test_a_fence_is_no_question():
    text = """(float[2] x, float[2] z) => (float[2] y, float[2] w) <float n = {0}, float m = {0}> {
        t = ReduceSum <keepdims = 0> (x) q = IsNaN (t) f = Where (q, n, m) y = Add (z, f) a = IsNaN (x) w = Where (a, z, x) }"""
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}'))
    assert write_forms(["webgpu"], model)
    assert [node.op_type for node in model.graph if node.op_type in ("IsNaN", "Less")] == ["Less", "IsNaN"]
    y, w = _run(ir.to_proto(model), {"x": np.array([np.nan, 1], F32), "z": np.array([3, 4], F32)})
    assert (y.tolist(), w.tolist()) == ([3, 4], [3, 1])


@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_passes_of_a_scan(axis, backward):
    """Along each axis and either way; what the body reads from outside, one Scan in another."""
    text = f"""(float[4,4] x, float[4] h, float[4] w) => (float[4] last, float[4,4] y)
    {{
        last, y = Scan <num_scan_inputs = 1, scan_input_axes = [{axis}], scan_input_directions = [{backward}], scan_output_axes = [{1 - axis}],
                        scan_output_directions = [{1 - backward}], body = b (float[4] s, float[4] r) => (float[4] s2, float[4] o) {{
            t = Mul (s, w)
            z = Constant <value = float {{0}}> ()
            sum, sums = Scan <num_scan_inputs = 1, body = c (float p, float q) => (float p2, float q2) {{ p2 = Add (p, q) q2 = Mul (p2, q) }}> (z, t)
            s2 = Add (sums, r)
            o = Sub (s2, sum)
        }}> (h, x)
    }}"""
    rng = np.random.default_rng(0)
    _written(text, {"Scan"}, {"x": rng.standard_normal((4, 4)).astype(F32), "h": rng.random(4).astype(F32), "w": rng.random(4).astype(F32)})


@pytest.mark.parametrize("on", ["on", "true", "other", ""])
def test_passes_of_a_loop(on):
    """With a condition that is handed on, that is constant, that may change (it stays), and without one."""
    text = f"""(float[3] x, bool go) => (float[3] y, float[4,3] z) <int64 n = {{4}}, bool first = {{1}}, float[4] w = {{1, 2, 3, 4}}> {{
        y, z = Loop (n, {"" if not on else "first"}, x) <body = b (int64 i, bool on, float[3] s) => (bool more, float[3] t, float[3] v) {{
            true = Constant <value = bool {{1}}> () k = Gather (w, i) other = And (on, go) more = Identity ({on or "on"}) t = Add (s, k) v = Mul (t, s) }}> }}"""
    feeds = {"x": np.arange(3, dtype=F32), "go": np.array(True)}
    if on == "other":
        model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}'))
        assert not write_forms(["webgpu"], model)
    else:
        _written(text, {"Loop"}, feeds)


BROKEN = (
    "(float[2] x) => (float[2] y) { y = Sum () }", "(float[2] x) => (float[2] y) { y = Sign () }", "(float[2] x) => (float[2] y) { y = Scan (x) }",
    "(float[2] x) => (float[2] y) { y = LogSoftmax <axis = 1.5> (x) }", "(float[2] x) => (float[2] y) { y = BitwiseAnd (x) }",
    "(float[2] x) => (float[2] y) { y = BatchNormalization <training_mode = 1> (x, x) }", "(float[2] x) => (float[2] y) { y = Mod () }",
    "(float[2] x) => (float[2] y) { y = Scan <num_scan_inputs = 3, body = b (float s) => (float t) { t = Neg (s) }> (x) }",
    "(float[2] x) => (float[2] y) { y = Scan <num_scan_inputs = 1, scan_input_axes = [7], body = b (float s) => (float t) { t = Neg (s) }> (x) }",
    "(float[2] x) => (float[2] y) <int64 n = {3}> { y = Loop (n) <body = b (int64 s) => (int64 t) { t = Neg (s) }> }",
    "(float[2] x) => (float[2] y) <int64[2] n = {3, 4}> { y = Loop (n, , x) <body = b (int64 i, bool on, float[2] s) => (bool on, float[2] t) { t = Neg (s) }> }",
)  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_nodes_that_onnxruntime_refuses_are_left_to_it(text):
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}'))
    operator = next(iter(model.graph)).op_type
    write_file("webgpu", model)
    assert [node.op_type for node in model.graph] == [operator]


def test_a_scan_of_an_open_length_stays():
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[N,2] x, float[2] h) => (float[2] y)
    { y = Scan <num_scan_inputs = 1, body = b (float[2] s, float[2] r) => (float[2] t) { t = Add (s, r) }> (h, x) }"""
    assert not write_forms(["webgpu"], ir.from_proto(onnx.parser.parse_model(text)))


POOLS = (
    {"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}, {"kernel_size": (3, 2), "stride": (1, 3)}, {"kernel_size": 2, "dilation": 3},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True}, {"kernel_size": 2, "stride": 3}, {"kernel_size": 3, "stride": 2, "padding": (0, 1), "ceil_mode": True},
)  # fmt: skip


@pytest.mark.parametrize("pool", POOLS, ids=[" ".join(f"{k}={v}" for k, v in pool.items()) for pool in POOLS])
def test_maxima_by_windows(pool):
    """Beside torch, with ties: half of it is zeros."""
    torch.manual_seed(0)
    layer, x = nn.MaxPool2d(**pool), F.relu(torch.randn(2, 3, 8, 9)).round(decimals=1).requires_grad_()
    y = layer(x)
    g = torch.randn_like(y)
    (wanted,) = torch.autograd.grad(y, x, g)
    model = exporter.build_gradient_graph(exporter.export(layer, (x.detach(),), dynamo=False), wrt=["input"])
    assert write_forms(["webgpu"], model)
    (node,) = [node for node in walk(model.graph) if node.op_type == "MaxPool"]
    assert len(node.outputs) == 1
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    names = [value.name for value in proto.graph.input]
    got, found = _run(proto, dict(zip(names, (x.detach().numpy(), g.numpy()), strict=True)))
    np.testing.assert_array_equal(got, y.detach().numpy())
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("auto", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize(("size", "kernel", "stride"), [((7,), [3], [2]), ((6, 5), [2, 3], [1, 2])])
def test_maxima_of_padded_and_of_flat_windows(size, kernel, stride, auto):
    """Beside the gradient of the plain file, on onnxruntime."""
    shape = ",".join(map(str, (2, 3, *size)))
    text = f"""<ir_version: 10, opset_import: ["": 20]> g (float[{shape}] x) => (float y)
        {{ p = MaxPool <kernel_shape = {kernel}, strides = {stride}, auto_pad = "{auto}"> (x) q = Mul (p, p) y = ReduceSum <keepdims = 0> (q) }}"""
    model = exporter.build_gradient_graph(onnx.parser.parse_model(text), wrt=["x"])
    plain = ir.to_proto(model)
    assert write_forms(["webgpu"], model)
    assert not {"ScatterElements", "MaxPoolGrad"} & {node.op_type for node in model.graph}
    feeds = {"x": np.random.default_rng(0).integers(-2, 3, (2, 3, *size)).astype(F32), "y_grad": np.array(1, F32)}
    for wanted, got in zip(_run(plain, feeds), _run(ir.to_proto(model), feeds), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_bodies_of_functions_are_written_too():
    text = """<ir_version: 10, opset_import: ["": 21, "own": 1]> g (float[2,3] x) => (float[2,3] y) { y = own.Twice (x) }
        <domain: "own", opset_import: ["": 21, "own": 1]> Twice (a) => (b) { c = own.Once (a) b = own.Once (c) }
        <domain: "own", opset_import: ["": 21]> Once (a) => (b) { b = LogSoftmax <axis = 1> (a) }"""
    proto = onnx.parser.parse_model(text)
    model = ir.from_proto(proto)
    assert write_forms(["webgpu"], model)
    assert not model.functions and "LogSoftmax" not in {node.op_type for node in model.graph}
    feeds = {"x": np.arange(6, dtype=F32).reshape(2, 3)}
    np.testing.assert_allclose(_run(ir.to_proto(model), feeds), _run(proto, feeds), rtol=1e-6)


def test_an_older_opset_where_all_was_there():
    feeds = {"x": np.arange(6, dtype=F32).reshape(2, 3)}
    _written("(float[2,3] x) => (float[3,2] y) { c = Cos (x) y = Transpose (c) }", set(), feeds, opset=23)
    stays = (
        "(float[2,3] x, float[3] s) => (float[2,3] y) { y = RMSNormalization (x, s) }",  # an operator of 23
        "(bfloat16[2,3] x) => (bfloat16[2,3] y) { y = Cos (x) }",  # a type of 22
    )
    for text in stays:
        model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 23]> g {text}'))
        assert not write_forms(["webgpu"], model)
        assert model.graph.opset_imports[""] == 23


# ---------------------------------------------------------------------------------------------------------- int64 as int32
def _narrowed(text, feeds, carried={}, opset=21):  # noqa: B006
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {text}')
    model = ir.from_proto(proto)
    names = narrow_integers(model, carried)
    made = ir.to_proto(model)
    onnx.checker.check_model(made, full_check=True)
    small = {name: array.astype(np.int32) if name in names else array for name, array in feeds.items()}
    wanted, got = _run(proto, feeds), _run(made, small)
    for name, one, other in zip([value.name for value in proto.graph.output], wanted, got, strict=True):
        assert other.dtype == (np.int32 if carried.get(name) in names else one.dtype), name
        np.testing.assert_array_equal(other, one)
    return {node.name or node.op_type: node for node in model.graph}


def test_integers_that_do_not_grow_are_small():
    text = """(int64[4] i, float[9] x, bool[4] c) => (int64 next, float[4] y, bool[4] e, int64[4] w, float[4,1] f)
        <int64 one = {1}, int64[1] a = {1}, int64[4] k = {-100, 1, 2, 3}> {
            first = ReduceMax <keepdims = 0> (i) next = Add (first, one) y = Gather (x, i) e = Equal (i, k) w = Where (c, i, k)
            u = Unsqueeze (i, a) f = Cast <to = 1> (u)
        }"""
    nodes = _narrowed(text, {"i": np.array([0, 8, -2, 3]), "x": np.arange(9, dtype=F32), "c": np.array([1, 0, 1, 0], bool)}, {"next": "i"})
    kinds = {value.dtype for node in nodes.values() for value in node.outputs if node.op_type != "Cast"}
    assert ir.DataType.INT64 not in kinds


def test_what_wants_int64_has_it():
    """Indices of ScatterND, sizes, products, constants beyond 32 bits, bodies, operators of other domains."""
    text = """(int64[2] i, float[3] x, bool c) => (float[3] y, float[P,Q] z, int64[2] m, int64[2] b, int64[2] t, int64 n)
        <int64[1] a = {1}, int64 large = {3000000000}, float[2] u = {1, 2}> {
            k = Unsqueeze (i, a) y = ScatterND (x, k, u) z = Expand (x0, i) m = Mul (i, i) b = Add (i, large)
            t = If (c) <then_branch = p () => (int64[2] q) { q = Mul (i, k0) }, else_branch = r () => (int64[2] s) { s = Identity (i) }>
            x0 = Constant <value = float {1}> () n = Size (i)
        }""".replace("k = Unsqueeze", "x0 = Constant <value = float {1}> () k0 = Constant <value = int64 {7}> () k = Unsqueeze").replace(
        "x0 = Constant <value = float {1}> () n =", "n ="
    )
    for on in (True, False):
        _narrowed(text, {"i": np.array([2, 1]), "x": np.arange(3, dtype=F32), "c": np.array(on)})


def test_sizes_are_small():
    text = """(int64[2] i, float[N] x) => (int64[2] y) <int64[1] z = {0}> { n = Shape (x) m = Sub (n, z) k = Add (i, m) l = Less (i, z) y = Where (l, k, i) }"""
    nodes = _narrowed(text, {"i": np.array([-1, 1]), "x": np.ones(5, F32)})
    assert nodes["Add"].outputs[0].dtype == ir.DataType.INT32


def test_what_was_short_before_stays_short():
    text = """(int32[2] i, bool[2] b) => (bool[2] y, int64[2] z) <int64 k = {7}> {
        w = Cast <to = 7> (i) y = Equal (w, k) c = Cast <to = 7> (b) z = Add (c, w) }"""
    nodes = _narrowed(text, {"i": np.array([7, 1], np.int32), "b": np.array([True, False])})
    assert [value.dtype for value in nodes["Equal"].inputs] == [ir.DataType.INT32] * 2


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_losses_of_the_standard(reduction):
    """Also one whose body has the other, of labels that are ignored: beside torch."""
    torch.manual_seed(0)
    x, target = torch.randn(5, 3, 2), torch.randint(0, 3, (5, 2))
    target[1, 0] = 1
    shape = "" if reduction == "mean" else "[5,2]"
    text = f"""<ir_version: 10, opset_import: ["": 20]> g (float[5,3,2] x, int64[5,2] t) => (float{shape} y)
        {{ y = SoftmaxCrossEntropyLoss <reduction = "{reduction}", ignore_index = 1> (x, t) }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert write_file("webgpu", model) == ["t"]
    assert ir.DataType.INT64 not in {
        value.dtype for node in model.graph for value in node.outputs if node.op_type not in ("Constant", "Shape")
    }
    assert not {"LogSoftmax", "NegativeLogLikelihoodLoss"} & {node.op_type for node in model.graph}
    (y,) = _run(ir.to_proto(model), {"x": x.numpy(), "t": target.numpy().astype(np.int32)})
    np.testing.assert_allclose(y, F.cross_entropy(x, target, reduction=reduction, ignore_index=1).numpy(), rtol=1e-6, atol=1e-7)


def test_branches_are_small_too():
    """What both branches give, what one of them gives in int64; a Cast of one branch is none for the other."""
    text = """(int64[2] i, bool c) => (int64[2] next, int64[2] y, float[2] z) <int64 one = {1}, int64 two = {2}> {
        next, y, z = If (c) <
            then_branch = p () => (int64[2] q, int64[2] r, float[2] f) { q = Add (i, one) r = Mul (i, two) f = Cast <to = 1> (q) },
            else_branch = s () => (int64[2] t, int64[2] u, float[2] g) { t = Identity (i) v = Mul (i, i) u = Sub (v, i) g = Cast <to = 1> (u) }> }"""
    for on in (True, False):
        (node,) = _narrowed(text, {"i": np.array([2, 5]), "c": np.array(on)}, {"next": "i"}).values()
        assert [value.dtype for value in node.outputs] == [ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT]


def test_what_may_need_64_bits_next_time_stays():
    """A generator of random numbers, which multiplies; what depends on it; the count beside it is small."""
    text = """(int64 r, int64 s, int64 n, int64[3] i) => (int64 r2, int64 s2, int64 n2, int64[3] j) <int64 a = {1103515245}, int64 m = {4294967296}, int64 one = {1}> {
        p = Mul (r, a) q = Add (p, one) r2 = Mod (q, m) s2 = Add (s, r2) n2 = Add (n, one) j = Add (i, n) }"""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
    model = ir.from_proto(proto)
    carried = {"r2": "r", "s2": "s", "n2": "n"}
    assert narrow_integers(model, carried) == ["n", "i"]
    state = {"r": np.array(3000000000), "s": np.array(5), "n": np.array(0)}
    small = {name: array.astype(np.int32) if name == "n" else array for name, array in state.items()}
    for _ in range(3):
        wanted, got = _run(proto, {**state, "i": np.arange(3)}), _run(ir.to_proto(model), {**small, "i": np.arange(3, dtype=np.int32)})
        assert [value.tolist() for value in wanted] == [value.tolist() for value in got]
        state, small = (dict(zip("rsn", values, strict=False)) for values in (wanted, got))


def test_a_provider_without_forms_is_named():
    with pytest.raises(ArgumentError, match="no forms for the provider cuda: openvino and webgpu have some"):
        write_file(
            "cuda",
            ir.from_proto(onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g (float x) => (float y) { y = Neg (x) }')),
        )


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_a_step_in_memory_takes_what_it_took(dynamo):
    """A session's forms leave inputs alone: convolution, batch norm, pooling, dropout, a recurrent layer, tokens; the CPU has the numbers of the plain step."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.image = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2), nn.Flatten())
            self.words, self.cells, self.head = nn.Embedding(9, 6), nn.GRU(6, 5, batch_first=True), nn.Linear(41, 3)

        def forward(self, x, ids):
            return self.head(torch.cat([self.image(x), self.cells(self.words(ids))[0][:, -1]], 1))

    torch.manual_seed(0)
    args, target = (torch.randn(4, 1, 8, 8), torch.randint(0, 9, (4, 3))), torch.randint(0, 3, (4,))
    numbers = {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}
    step = exporter.export_training_step(
        Net().train(), args, loss=F.cross_entropy, targets=(target,), optimizer="sgd", hyperparameters=numbers, dynamo=dynamo
    )
    model = step.model.clone()
    assert write_forms(["webgpu"], model)
    assert [(value.name, value.dtype) for value in model.graph.inputs] == [(value.name, value.dtype) for value in step.model.graph.inputs]
    given = {
        **step.initial,
        **dict(zip((*step.layout.inputs, *step.layout.targets), (each.numpy() for each in (*args, target)), strict=True)),
    }
    feeds = {value.name: given[value.name] for value in step.model.graph.inputs}
    wanted, got = (
        dict(zip([value.name for value in each.graph.outputs], _run(ir.to_proto(each), feeds), strict=True)) for each in (step.model, model)
    )
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
