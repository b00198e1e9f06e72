"""Files that compute in integers, as onnxruntime's own tools write them: a gradient that would have to pass is refused by name."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static

import exporter
from symbolics.errors import UnsupportedOperatorError
from symbolics.gradients import Rule
from tests.symbolics.gradients.tools import run

Q8 = "s = Constant<value = float {0.1}>() z = Constant<value = uint8 {120}>() q = QuantizeLinear(a, s, z)"
W8 = "k = Constant<value = uint8[3,3] {130, 110, 120, 125, 119, 140, 90, 128, 121}>()"
DYNAMIC = "q, s, z = DynamicQuantizeLinear(a)"
BACK = "DequantizeLinear(r, s, z)"
ORT = "com.microsoft::"

#: The operator that is named -> how a model comes from the float[2,3] a to a y of two axes.
FAMILIES = {
    "MatMulInteger": f"{DYNAMIC} {W8} i = MatMulInteger(q, k, z, z) f = Cast<to = 1>(i) y = Mul(f, s)",
    "MatMulInteger, without the scale": f"{DYNAMIC} {W8} i = MatMulInteger(q, k, z) y = Cast<to = 1>(i)",
    "MatMulInteger, moved": f"{DYNAMIC} {W8} t = Transpose(q) i = MatMulInteger(k, t) n = Transpose(i) u = Unsqueeze(n, l) v = Squeeze(u, l) y = Cast<to = 1>(v)",
    "ConvInteger": f"{DYNAMIC} t = Reshape(q, four) i = ConvInteger(t, c, z) f = Cast<to = 1>(i) m = Mul(f, s) y = Reshape(m, two)",
    "QLinearMatMul": f"{Q8} {W8} r = QLinearMatMul(q, s, z, k, s, z, s, z) y = {BACK}",
    "QLinearConv": f"{Q8} t = Reshape(q, four) r = QLinearConv(t, s, z, c, s, z, s, z) m = {BACK} y = Reshape(m, two)",
    "QLinearConv, pooled": f"{Q8} t = Reshape(q, four) o = QLinearConv(t, s, z, c, s, z, s, z) r = Reshape(o, two) y = {BACK}",
    f"{ORT}QLinearAdd": f"{Q8} r = com.microsoft.QLinearAdd(q, s, z, q, s, z, s, z) y = {BACK}",
    f"{ORT}QLinearSigmoid": f"{Q8} r = com.microsoft.QLinearSigmoid(q, s, z, s, z) y = {BACK}",
    f"{ORT}QLinearConcat": f"{Q8} r = com.microsoft.QLinearConcat<axis = 0>(s, z, q, s, z, q, s, z) y = {BACK}",
    f"{ORT}QLinearLeakyRelu": f"{Q8} r = com.microsoft.QLinearLeakyRelu(q, s, z, s, z) y = {BACK}",
    f"{ORT}QGemm": f"{Q8} {W8} r = com.microsoft.QGemm(q, s, z, k, s, z, , s, z) y = {BACK}",
    f"{ORT}MatMulIntegerToFloat": f"{DYNAMIC} {W8} y = com.microsoft.MatMulIntegerToFloat(q, k, s, s, z, z)",
    f"{ORT}DynamicQuantizeMatMul": f"{W8} s = Constant<value = float {{0.1}}>() y = com.microsoft.DynamicQuantizeMatMul(a, k, s)",
    f"{ORT}QAttention": f"{Q8} {W8} t = Unsqueeze(q, l) b = Constant<value = float[3] {{0,0,0}}>() v = com.microsoft.QAttention<num_heads = 1>(t, k, b, s, s, , z, z) y = Squeeze(v, l)",
    f"{ORT}QuantizeLinear": f"{Q8} p = com.microsoft.QuantizeLinear(a, s, z) y = DequantizeLinear(p, s, z)",
    "MaxPool": f"{Q8} t = Reshape(q, four) p = MaxPool<kernel_shape = [1, 1]>(t) m = DequantizeLinear(p, s, z) y = Reshape(m, two)",
    "Add": f"{Q8} n = Cast<to = 6>(q) i = Add(n, n) y = Cast<to = 1>(i)",
}
#: What the parser gives no type: outputs of com.microsoft have one in files of onnxruntime's tools, or none.
TYPED = ("", "uint8[2,3] r, uint8[2,3] p")


def model(body: str, *, types: str = "", inputs: str = "", functions: str = "") -> onnx.ModelProto:
    """float[2,3] x -> MatMul by w1 -> body, from ``a`` to ``y`` -> product with w2 -> out; ``skip`` is a product with w2 alone."""
    declared = ", ".join(filter(None, ["float[3,3] w1 = {1,2,3,4,5,6,7,8,10}", "float[3] w2 = {1,2,3}", "int64[4] four = {1,1,2,3}", "int64[2] two = {2,3}",
        "int64[1] l = {0}", "uint8[1,1,1,1] c = {125}", types]))  # fmt: skip
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1, "own": 1]> g (float[2,3] x{inputs}) => (float[n,m] out, float[2,3] skip)'
        f" <{declared}> {{ a = MatMul(x, w1) {body} out = Mul(y, w2) skip = Mul(x, w2) }} {functions}"
    )


@pytest.mark.parametrize("types", TYPED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gradient_that_would_pass_is_refused_by_name(family, types):
    proto = model(FAMILIES[family], types=types if " r = com" in FAMILIES[family] or " p = com" in FAMILIES[family] else "")
    for wrt in (["w1"], ["x"], None):
        with pytest.raises(
            UnsupportedOperatorError, match=rf"no gradient for {family.partition(',')[0]} \(node.* that makes .*QDQ"
        ) as caught:
            exporter.build_gradient_graph(proto, wrt=wrt)
        assert str(caught.value).count("\n") < 6
    with pytest.raises(UnsupportedOperatorError):
        exporter.build_tangent_graph(proto, wrt=["w1"])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_does_not_pass_there_has_its_gradient(family):
    proto = model(FAMILIES[family])
    behind = exporter.build_gradient_graph(proto, wrt=["w2"], outputs=["out"])
    beside = exporter.build_gradient_graph(proto, wrt=["x", "w2"], outputs=["skip"])
    kinds = [node.op_type for node in behind.graph]
    assert family.partition(",")[0].rpartition(":")[2] in kinds
    x, g = np.random.default_rng(0).standard_normal((2, 2, 3)).astype(np.float32)
    got = run(beside, {"x": x, "skip_grad": g}, ["x_grad", "w2_grad"])
    np.testing.assert_allclose(got["x_grad"], g * [1, 2, 3], rtol=1e-6)
    np.testing.assert_allclose(got["w2_grad"], (g * x).sum(0), rtol=1e-5)


@pytest.mark.parametrize("family", ["MatMulInteger", "MatMulInteger, without the scale", "QLinearMatMul", "QLinearConv, pooled"])
def test_a_loaded_file_runs_and_its_backward_is_refused_where_it_would_pass(family):
    module = exporter.load(model(FAMILIES[family]))
    x = torch.randn(2, 3)
    out, _ = module(x)
    with pytest.raises(UnsupportedOperatorError, match=family.partition(",")[0]):
        out.sum().backward()
    module.w1.requires_grad_(False)
    out, _ = module(x)
    out.sum().backward()
    torch.testing.assert_close(module.w2.grad * module.w2, out.detach().sum(0))


def test_scales_of_each_channel_are_settings():
    body = "{q} k = Constant<value = uint8[3,3] {1,2,3,4,5,6,7,8,9}>() r = QLinearMatMul(q, s, z, k, ss, zz, s, z) y = DequantizeLinear(r, s, z)"
    proto = model(body.replace("{q}", Q8), types="float[3] ss = {0.1, 0.2, 0.3}, uint8[3] zz = {1, 2, 3}")
    assert [name for name, _ in exporter.load(proto).named_parameters()] == ["w1", "w2"]


#: Operators that hand on what a QuantizeLinear gave, before a DequantizeLinear: as they would behind it.
MOVES = {
    "Transpose": "Transpose({})",
    "Reshape": "Reshape({}, v)",
    "Unsqueeze": "Unsqueeze({}, l)",
    "Identity": "Identity({})",
    "Concat": "Concat<axis = 1>({}, {})",
    "Slice": "Slice({}, l, b)",
    "Tile": "Tile({}, v)",
    "Expand": "Expand({}, e)",
    "Flatten": "Flatten<axis = 0>({})",
    "Squeeze of an Unsqueeze": "Unsqueeze({}, l) r = Squeeze(u, l)",
    "Cast": "Cast<to = 6>({})",
}


@pytest.mark.parametrize("move", MOVES)
def test_elements_that_are_moved_between_the_two_keep_their_gradient(move):
    x = np.random.default_rng(0).uniform(0.1, 3, (2, 3)).astype(np.float32)
    found = []
    for first, then in (("q", "y = DequantizeLinear(r, s)"), ("d", "y = Identity(r)")):
        moved = MOVES[move].format(first, first)
        moved = f"u = {moved}" if "Squeeze(" in moved else f"r = {moved}" if first == "q" or move != "Cast" else "r = Identity(d)"
        proto = onnx.parser.parse_model(
            f"""<ir_version: 8, opset_import: ["": 18]> g (float[2,3] x) => (float y)
            <int64[2] v = {{3,2}}, int64[1] l = {{0}}, int64[1] b = {{2}}, int64[3] e = {{2,2,3}}, float s = {{0.1}}, uint8 z = {{0}}>
            {{ q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s) {moved} {then} }}"""
        )
        proto.graph.output[0].type.tensor_type.ClearField("shape")
        training = exporter.build_gradient_graph(proto, wrt=["x"])
        y = run(exporter.build_gradient_graph(proto, wrt=["x"], outputs=[]), {"x": x})["y"]
        found.append(run(training, {"x": x, "y_grad": np.arange(1, y.size + 1, dtype=np.float32).reshape(y.shape)})["x_grad"])
    assert np.abs(found[1]).max() > 0.5
    np.testing.assert_allclose(*found, rtol=1e-5)


#: Integers that are made inside of something, and read outside: what is named, and its text.
INSIDE = {
    "If": ("If", "q, s, z = DynamicQuantizeLinear(a) b = Constant<value = int32 {1}>() t = Cast<to = 9>(b) no = And(t, cond)"
           " i = If(no) <then_branch = t () => (int32[2,3] o) { WEIGHTS o = MatMulInteger(q, k, z) }, else_branch = e () => (int32[2,3] p)"
           " { w = Cast<to = 6>(a) p = Identity(w) }> y = Cast<to = 1>(i)"),
    "If with the float inside": ("MatMulInteger", "y = If(cond) <then_branch = t () => (float[2,3] o) { WEIGHTS q, s, z = DynamicQuantizeLinear(a)"
           " i = MatMulInteger(q, k, z) o = Cast<to = 1>(i) }, else_branch = e () => (float[2,3] p) { p = Identity(a) }>"),
    "Loop": ("Loop", "n = Constant<value = int64 {2}>() h, i = Loop(n, , a) <body = b (int64 j, bool t, float[2,3] m) => (bool f, float[2,3] g, int32[2,3] r)"
           " { f = Identity(t) WEIGHTS q, s, z = DynamicQuantizeLinear(m) r = MatMulInteger(q, k, z) g = Identity(m) }> v = Cast<to = 1>(i) y = ReduceSum(v, l)"),
    "a function": ("MatMulInteger", "i = own.Product(a) y = Cast<to = 1>(i)"),
}  # fmt: skip
PRODUCT = (
    f'<domain: "own", opset_import: ["": 18]> Product (a) => (i) {{ q, s, z = DynamicQuantizeLinear(a) {W8} i = MatMulInteger(q, k, z) }}'
)


@pytest.mark.parametrize("case", INSIDE)
def test_integers_inside_of_bodies_and_functions(case):
    named, body = INSIDE[case][0], INSIDE[case][1].replace("WEIGHTS", W8)
    proto = model(body, inputs=", bool cond", functions=PRODUCT if "own." in body else "")
    with pytest.raises(UnsupportedOperatorError, match=rf"no gradient for {named} .*computes in integers"):
        exporter.build_gradient_graph(proto, wrt=["w1"])
    exporter.build_gradient_graph(proto, wrt=["w2"])


#: Integers that are data: of what was quantised, too.
DATA = {
    "a mask": f"{Q8} h = Equal(q, z) m = Cast<to = 1>(h) d = DequantizeLinear(q, s, z) y = Mul(d, m)",
    "a mask by a cast": f"{Q8} h = Cast<to = 9>(q) y = Where(h, a, a)",
    "an index": f"{Q8} h = ArgMax<axis = 1>(q) o = Cast<to = 1>(h) y = Add(a, o)",
    "an index in an If": "h = If(cond) <then_branch = t () => (int64[2,1] o) { o = ArgMax<axis = 1>(a) }, else_branch = e () => (int64[2,1] p)"
    f" {{ {Q8} d = DequantizeLinear(q, s, z) p = ArgMax<axis = 1>(d) }}> f = Cast<to = 1>(h) y = Add(a, f)",
    "an index of a function": "i = own.Product(a) f = Cast<to = 1>(i) y = Add(a, f)",
    "a cast": "h = Cast<to = 6>(a) o = Cast<to = 1>(h) y = Add(a, o)",
    "a product of casts": f"h = Cast<to = 2>(a) {W8} i = MatMulInteger(h, k) o = Cast<to = 1>(i) y = Add(a, o)",
    "sizes": f"{Q8} h = Shape(q) i = Reshape(q, h) d = DequantizeLinear(i, s, z) y = Add(a, d)",
    "a product of constants": f"{W8} i = MatMulInteger(k, k) f = Cast<to = 1>(i) y = MatMul(a, f)",
}
INDEX = '<domain: "own", opset_import: ["": 18]> Product (a) => (i) { n = Constant<value = float {0.1}>() q = QuantizeLinear(a, n) d = DequantizeLinear(q, n) i = ArgMax<axis = 1>(d) }'


@pytest.mark.parametrize("case", DATA)
def test_integers_that_are_data_say_nothing(case):
    proto = model(DATA[case], inputs=", bool cond", functions=INDEX if "own." in DATA[case] else "")
    for wrt in (["w1"], ["x"], None):
        exporter.build_gradient_graph(proto, wrt=wrt)


def test_a_rule_of_the_user_passes():
    """The product of the levels, as that of floats."""

    def rule(op, g, a, b, za, zb):
        return op.MatMul(g, op.Transpose(op.Cast(b, to=1) - op.Cast(zb, to=1), perm=[1, 0]))

    weights = np.array([[130, 110, 120], [125, 119, 140], [90, 128, 121]], np.float32) - 120
    proto = model(f"{Q8} {W8} i = MatMulInteger(q, k, z, zb) f = Cast<to = 1>(i) y = Mul(f, s)", types="uint8 zb = {120}")
    with pytest.raises(UnsupportedOperatorError, match="straight_through=True"):
        exporter.build_gradient_graph(proto, wrt=["w1"], overrides={"MatMulInteger": rule})
    through = {"MatMulInteger": Rule(rule, straight_through=True)}
    x, g = np.random.default_rng(0).uniform(-0.5, 0.5, (2, 2, 3)).astype(np.float32)
    got = run(exporter.build_gradient_graph(proto, wrt=["x"], outputs=["out"], overrides=through), {"x": x, "out_grad": g})
    w1 = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 10]], np.float32)
    np.testing.assert_allclose(got["x_grad"], (g * [1, 2, 3]) @ weights.T @ w1.T, rtol=1e-4, atol=1e-4)


def test_ranks_are_known_behind_operators_of_which_onnx_infers_nothing():
    """Which take turns with those of ONNX: a layer behind them has its gradient."""
    add = "com.microsoft.QLinearAdd({0}, s, z, {0}, s, z, s, z)"
    turns = " ".join(f"p{i} = {add.format(f'o{i}')} o{i + 1} = MaxPool<kernel_shape = [1, 1]>(p{i}) " for i in range(3))
    tail = "f = Reshape(o3, two) h = com.microsoft.QGemm(f, s, z, k, s, z, , s, z) d = DequantizeLinear(h, s, z) b = Softmax(d) y = MatMul(b, w3)"
    body = f"{Q8} {W8} o0 = Reshape(q, four) {turns} {tail}"
    proto = model(body, types="float[3,3] w3 = {1,2,3,4,5,6,7,8,9}")
    x, g = np.random.default_rng(0).standard_normal((2, 2, 3)).astype(np.float32)
    training = exporter.build_gradient_graph(proto, wrt=["w3"], outputs=["out"])
    training.graph.outputs.append(next(v for node in training.graph for v in node.outputs if v.name == "b"))
    got = run(training, {"x": x, "out_grad": g})
    np.testing.assert_allclose(got["w3_grad"], got["b"].T @ (g * [1, 2, 3]), rtol=1e-5)
    with pytest.raises(UnsupportedOperatorError, match="no gradient for com.microsoft::QGemm"):
        exporter.build_gradient_graph(proto, wrt=["x"], outputs=["out"])


class Samples(CalibrationDataReader):
    def __init__(self):
        self.left = [{"x": np.random.default_rng(seed).standard_normal((2, 2, 4, 4)).astype(np.float32)} for seed in range(4)]

    def get_next(self):
        return self.left.pop() if self.left else None


@pytest.mark.parametrize(("written", "named"), [("dynamic", "MatMulInteger"), ("operators", "QGemm|QLinearMatMul"), ("QDQ", "")])
def test_files_of_onnxruntimes_own_tools(written, named, tmp_path):
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[2,2,4,4] x) => (float[2,4] y)
        { a = Conv(x, w1) b = Tanh(a) c = Conv<pads = [1,1,1,1]>(b, w2) d = Relu(c) e = Add(d, b) f = Flatten(e) y = MatMul(f, w3) }"""
    )
    rng = np.random.default_rng(0)
    for name, shape in (("w1", (2, 2, 1, 1)), ("w2", (2, 2, 3, 3)), ("w3", (32, 4))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    proto.graph.node[0].name = "first"
    source, target = tmp_path / "float.onnx", tmp_path / "integers.onnx"
    onnx.save(proto, source)
    if written == "dynamic":
        quantize_dynamic(source, target, nodes_to_exclude=["first"])
    else:
        kind = QuantFormat.QOperator if written == "operators" else QuantFormat.QDQ
        quantize_static(source, target, Samples(), quant_format=kind, nodes_to_exclude=["first"])
    x, g = rng.standard_normal((2, 2, 4, 4)).astype(np.float32), rng.standard_normal((2, 4)).astype(np.float32)
    if named:
        with pytest.raises(UnsupportedOperatorError, match=rf"no gradient for (com.microsoft::)?({named}) \(node '.*' that makes .*QDQ"):
            exporter.build_gradient_graph(target, wrt=["w1"])
        return
    one, other = (run(exporter.build_gradient_graph(file, wrt=["w1"]), {"x": x, "y_grad": g})["w1_grad"] for file in (source, target))
    np.testing.assert_allclose(one, other, atol=0.1 * np.abs(one).max())
