"""One line an operator: gradients to second order against finite differences, in float64.

UNARY and the lists beside it name operators that need nothing else, `BODIES` has models of text, `EDGES` zeros, ties and saturation.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from exporter.gradient_graph.build import build_gradient_graph
from symbolics.errors import UnsupportedOperatorError
from tests.symbolics.gradients.tools import check, gradients, model_of, run

X = "float[2,3] x"
XY = "float[2,3] x, float[3] b"
I64 = np.int64

UNARY = [
    "Abs",
    "Exp",
    "Neg",
    "Sin",
    "Cos",
    "Tanh",
    "Sigmoid",
    "Softplus",
    "Softsign",
    "Erf",
    "Relu",
    "LeakyRelu",
    "Elu",
    "Selu",
    "Celu",
    "Gelu",
    "HardSigmoid",
    "HardSwish",
    "Mish",
    "Atan",
    "Sinh",
    "Cosh",
    "Asinh",
]
POSITIVE = ["Log", "Sqrt", "Reciprocal", "Acosh"]
INSIDE = ["Asin", "Acos", "Atanh", "Tan"]


@pytest.mark.parametrize("op", UNARY)
def test_unary(op):
    check(X, f"y = {op}(x)", step=1e-2 if op in ("Erf", "Gelu") else 1e-4)  # the evaluator's Erf is float32


@pytest.mark.parametrize("op", POSITIVE)
def test_unary_of_positive(op):
    check(X, f"y = {op}(x)", {"x": np.linspace(1.2, 3, 6).reshape(2, 3)})


@pytest.mark.parametrize("op", INSIDE)
def test_unary_inside_the_unit_interval(op):
    check(X, f"y = {op}(x)", {"x": np.linspace(-0.7, 0.8, 6).reshape(2, 3)})


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Max", "Min", "Sum", "Mean"])
def test_binary_with_broadcast(op):
    check(XY, f"y = {op}(x, b)")


BODIES = {
    "Div": (XY, "y = Div(x, b)", {"b": np.array([1.0, -2.0, 0.7])}),
    "Pow": (XY, "y = Pow(x, b)", {"x": np.linspace(0.5, 2, 6).reshape(2, 3)}),
    "Pow constant": (X, "p = Constant<value = float {3.0}>() y = Pow(x, p)", None),
    "Mod": (XY, "y = Mod<fmod = 1>(x, b)", {"x": np.linspace(1.3, 4.4, 6).reshape(2, 3), "b": np.array([1.1, 0.9, 1.7])}),
    "Clip": (X, "a = Constant<value = float {-0.5}>() c = Constant<value = float {0.4}>() y = Clip(x, a, c)", None),
    "Clip bounds": ("float[2,3] x, float lo, float hi", "y = Clip(x, lo, hi)", {"lo": np.array(-0.3), "hi": np.array(0.3)}),
    "PRelu": (XY, "y = PRelu(x, b)", None),
    "Where": (XY, "c = Greater(x, b) y = Where(c, x, b)", None),
    "Shrink": (X, "y = Shrink<bias = 0.1, lambd = 0.3>(x)", None),
    "ThresholdedRelu": (X, "y = ThresholdedRelu<alpha = 0.2>(x)", None),
    "MatMul": ("float[2,3,4] x, float[4,5] w", "y = MatMul(x, w)", None),
    "MatMul matrices": ("float[3,4] x, float[4,5] w", "y = MatMul(x, w)", None),
    "MatMul transposed weight": ("float[3,4] x, float[5,4] w", "t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t)", None),
    "MatMul broadcast": ("float[2,1,3,4] x, float[5,4,2] w", "y = MatMul(x, w)", None),
    "MatMul vector": ("float[4] x, float[2,4,3] w", "y = MatMul(x, w)", None),
    "MatMul vector right": ("float[2,3,4] x, float[4] w", "y = MatMul(x, w)", None),
    "Gemm": ("float[4,3] a, float[2,4] b, float[2] c", "y = Gemm<alpha = 0.5, beta = 2.0, transA = 1, transB = 1>(a, b, c)", None),
    "Einsum": ("float[2,3] a, float[3,4] b", 'y = Einsum<equation = "ij,jk->ki">(a, b)', None),
    "Einsum ellipsis": ("float[2,2,3] a, float[3,4] b", 'y = Einsum<equation = "...ij,jk">(a, b)', None),
    "Einsum, stretched and summed": ("float[2,1] a, float[3,4] b", 'y = Einsum<equation = "ij,jk->ik">(a, b)', None),
    "Einsum, both stretched": ("float[1,2,3] a, float[2,3,1] b", 'y = Einsum<equation = "bij,bjk">(a, b)', None),
    "Einsum diagonal": ("float[3,3] a", 'y = Einsum<equation = "ii->i">(a)', None),
    "ReduceSum": (X, "a = Constant<value_ints = [1]>() y = ReduceSum<keepdims = 0>(x, a)", None),
    "ReduceMean": (X, "y = ReduceMean(x)", None),
    "ReduceMax": (X, "a = Constant<value_ints = [0]>() y = ReduceMax(x, a)", None),
    "ReduceProd": (X, "a = Constant<value_ints = [1]>() y = ReduceProd(x, a)", None),
    "ReduceL1": (X, "a = Constant<value_ints = [1]>() y = ReduceL1(x, a)", None),
    "ReduceL2": (X, "a = Constant<value_ints = [1]>() y = ReduceL2(x, a)", None),
    "ReduceLogSumExp": (X, "a = Constant<value_ints = [1]>() y = ReduceLogSumExp(x, a)", None),
    "ReduceSumSquare": (X, "a = Constant<value_ints = [1]>() y = ReduceSumSquare<keepdims = 0>(x, a)", None),
    "CumSum": (X, "a = Constant<value = int64 {1}>() y = CumSum<exclusive = 1>(x, a)", None),
    "Softmax": (X, "y = Softmax(x)", None),
    "LogSoftmax": (X, "y = LogSoftmax<axis = 0>(x)", None),
    "LayerNormalization": ("float[2,3,4] x, float[4] s, float[4] b", "y = LayerNormalization(x, s, b)", None),
    "InstanceNormalization": ("float[2,3,4] x, float[3] s, float[3] b", "y = InstanceNormalization(x, s, b)", None),
    "LpNormalization": (X, "y = LpNormalization<p = 2>(x)", None),
    "Transpose": ("float[2,3,4] x", "t = Transpose<perm = [2, 0, 1]>(x) y = Mul(t, t)", None),
    "Reshape": (X, "s = Constant<value_ints = [3, -1]>() t = Reshape(x, s) y = Mul(t, t)", None),
    "Concat": (X, "t = Exp(x) u = Concat<axis = 1>(x, t) y = Mul(u, u)", None),
    "Split": ("float[4,3] x", "a, b = Split<num_outputs = 2>(x) y = Mul(a, b)", None),
    "Split, one part read": ("float[4,3] x", "a, b = Split<num_outputs = 2>(x) y = Exp(b)", None),
    "Slice": (
        "float[4,3] x",
        "s = Constant<value_ints = [-3]>() e = Constant<value_ints = [4]>() a = Constant<value_ints = [0]>() y = Slice(x, s, e, a)",
        None,
    ),
    "Slice steps": (
        "float[5,3] x",
        "s = Constant<value_ints = [-1]>() e = Constant<value_ints = [-9]>() a = Constant<value_ints = [0]>() p = Constant<value_ints = [-2]>() t = Slice(x, s, e, a, p) y = Exp(t)",
        None,
    ),
    "Pad": (X, "p = Constant<value_ints = [1, 0, 0, 2]>() t = Pad(x, p) y = Mul(t, t)", None),
    "Pad reflect": ("float[3,4] x", 'p = Constant<value_ints = [1, 2, 0, 1]>() t = Pad<mode = "reflect">(x, p) y = Mul(t, t)', None),
    "Expand": ("float[3,1] x", "s = Constant<value_ints = [2, 3, 4]>() t = Expand(x, s) y = Mul(t, t)", None),
    "Tile": (X, "r = Constant<value_ints = [2, 3]>() t = Tile(x, r) y = Mul(t, t)", None),
    "Gather": ("float[4,3] x, int64[2,2] i", "t = Gather(x, i) y = Mul(t, t)", {"i": np.array([[0, 3], [3, -1]], I64)}),
    "Gather axis 1": ("float[2,4] x, int64[3] i", "t = Gather<axis = 1>(x, i) y = Mul(t, t)", {"i": np.array([1, 1, 3], I64)}),
    "Gather one": ("float[2,4] x", "i = Constant<value = int64 {-2}>() t = Gather<axis = 1>(x, i) y = Mul(t, t)", None),
    "GatherElements": ("float[3,2] x, int64[2,2] i", "t = GatherElements(x, i) y = Exp(t)", {"i": np.array([[0, 2], [0, 1]], I64)}),
    "GatherND": ("float[3,2] x, int64[3,1] i", "t = GatherND(x, i) y = Exp(t)", {"i": np.array([[0], [2], [2]], I64)}),
    "ScatterND": ("float[4,2] x, int64[2,1] i, float[2,2] u", "t = ScatterND(x, i, u) y = Exp(t)", {"i": np.array([[0], [2]], I64)}),
    "ScatterElements add": (
        "float[4] x, int64[3] i, float[3] u",
        'y = ScatterElements<reduction = "add">(x, i, u)',
        {"i": np.array([0, 2, 2], I64)},
    ),
    "TopK": ("float[2,5] x", "k = Constant<value_ints = [2]>() y, i = TopK(x, k)", None),
    "Trilu": ("float[3,3] x", "t = Trilu<upper = 0>(x) y = Exp(t)", None),
    "DepthToSpace": ("float[1,4,2,2] x", 't = DepthToSpace<blocksize = 2, mode = "CRD">(x) y = Exp(t)', None),
    "SpaceToDepth": ("float[1,1,4,2] x", "t = SpaceToDepth<blocksize = 2>(x) y = Exp(t)", None),
    "OneHot": (
        "float[2] v, int64[3] i",
        "d = Constant<value = int64 {4}>() t = OneHot(i, d, v) y = Mul(t, t)",
        {"i": np.array([0, 3, 1], I64)},
    ),
    "Conv": ("float[2,2,5,5] x, float[3,2,3,3] w, float[3] b", "y = Conv<strides = [2, 2], pads = [1, 1, 0, 1]>(x, w, b)", None),
    "Conv groups": ("float[1,2,4,4] x, float[2,1,2,2] w", "y = Conv<group = 2>(x, w)", None),
    "Conv dilated": ("float[1,1,6,6] x, float[1,1,2,2] w", 'y = Conv<dilations = [2, 2], auto_pad = "SAME_UPPER">(x, w)', None),
    "ConvTranspose": ("float[1,2,3,3] x, float[2,2,2,2] w", "y = ConvTranspose<strides = [2, 2], output_padding = [1, 0]>(x, w)", None),
    "AveragePool": (
        "float[1,2,4,4] x",
        "y = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1], ceil_mode = 1, strides = [2, 2]>(x)",
        None,
    ),
    "AveragePool padded": (
        "float[1,1,5,4] x",
        "t = AveragePool<kernel_shape = [3, 1], pads = [1, 0, 1, 0], count_include_pad = 1>(x) y = Mul(t, t)",
        None,
    ),
    "MaxPool": ("float[1,2,4,4] x", "y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x)", None),
    "GlobalAveragePool": ("float[1,2,3,3] x", "y = GlobalAveragePool(x)", None),
    "GlobalMaxPool": ("float[1,2,3,3] x", "y = GlobalMaxPool(x)", None),
    "LRN": ("float[5,5,1,2] x", "y = LRN<size = 3, alpha = 0.5>(x)", None),
    "Resize linear": (
        "float[1,1,3,3] x",
        'r = Constant<value = float[1] {0.0}>() s = Constant<value_floats = [1.0, 1.0, 2.0, 1.5]>() y = Resize<mode = "linear">(x, , s)',
        None,
    ),
    "TensorScatter": (
        "float[2,4,2] x, float[2,2,2] u",
        'i = Constant<value_ints = [1, 3]>() y = TensorScatter<axis = 1, mode = "circular">(x, u, i)',
        None,
    ),
    "Det": ("float[2,3,3] x", "y = Det(x)", None),
    "Attention-like": (
        "float[2,3,4] q, float[2,3,4] k, float[2,3,4] v",
        "t = Transpose<perm = [0, 2, 1]>(k) a = MatMul(q, t) p = Softmax(a) y = MatMul(p, v)",
        None,
    ),
    "several uses": (X, "a = Exp(x) b = Sin(x) c = Mul(a, b) d = Add(c, x) y = Mul(d, a)", None),
    "two outputs": (X, "a = Exp(x) z = Sin(a) y = Mul(a, a)", None),
}


ONCE = {"MaxPool", "Resize linear", "Gather one"}  # the evaluator lacks what the second order needs, or the second is 0


@pytest.mark.parametrize("name", BODIES)
def test_operator(name):
    signature, body, inputs = BODIES[name]
    check(signature, body, inputs, order=1 if name in ONCE else 2)


# ------------------------------------------------------------------------------------------------------------ sequences
SEQUENCES = {
    "at": "s = SequenceConstruct(x, w) p = Constant<value = int64 {1}>() e = SequenceAt(s, p) y = Mul(e, x)",
    "from the end": "s = SequenceConstruct(x, w, x) p = Constant<value = int64 {-2}>() e = SequenceAt(s, p) y = Mul(e, x)",
    "concat": "e = Exp(x) s = SequenceConstruct(e, w) y = ConcatFromSequence<axis = 1>(s)",
    "stack": "e = Exp(x) s = SequenceConstruct(e, w) y = ConcatFromSequence<axis = 0, new_axis = 1>(s)",
    "insert": "p = Constant<value = int64 {0}>() s = SequenceConstruct(x, x) t = SequenceInsert(s, w, p) u = SequenceInsert(t, x) y = ConcatFromSequence<axis = 0>(u)",
    "erase": "p = Constant<value = int64 {0}>() s = SequenceConstruct(x, w, w) t = SequenceErase(s, p) u = SequenceErase(t) q = Constant<value = int64 {0}>() e = SequenceAt(u, q) y = Sin(e)",
    "split": "s = SplitToSequence<axis = 1>(x) p = Constant<value = int64 {2}>() q = Constant<value = int64 {0}>() a = SequenceAt(s, p) b = SequenceAt(s, q) y = Mul(a, b)",
    "split, squeezed": "s = SplitToSequence<axis = 1, keepdims = 0>(x) p = Constant<value = int64 {2}>() a = SequenceAt(s, p) y = Mul(a, a)",
    "equal parts": "n = Constant<value = int64 {2}>() s = SplitToSequence<axis = 1>(x, n) y = ConcatFromSequence<axis = 1>(s)",
    "map": "s = SequenceConstruct(x, w) t = SequenceMap<body = twice (float[2,3] a) => (float[2,3] c) { c = Mul(a, a) }>(s) y = ConcatFromSequence<axis = 0>(t)",
    "map with a tensor": "s = SequenceConstruct(x, x) t = SequenceMap<body = times (float[2,3] a, float[2,3] b) => (float[2,3] c) { c = Mul(a, b) }>(s, w) p = Constant<value = int64 {1}>() y = SequenceAt(t, p)",
    "parts": "n = Constant<value = int64[2] {1, 2}>() s = SplitToSequence<axis = 1>(x, n) p = Constant<value = int64 {1}>() a = SequenceAt(s, p) y = Sin(a)",
}  # fmt: skip


@pytest.mark.parametrize("body", SEQUENCES.values(), ids=SEQUENCES)
def test_sequences_of_known_length_and_positions(body):
    check("float[2,3] x, float[2,3] w", body)


def test_a_sequence_position_known_only_at_run_time_is_refused():
    model = model_of("float[2] x, int64 i", "s = SequenceConstruct(x, x) y = SequenceAt(s, i)")
    with pytest.raises(UnsupportedOperatorError, match="SequenceAt.*only at run time"):
        build_gradient_graph(model)


@pytest.mark.parametrize("mode", ["half_pixel", "output_half_pixel"])
def test_roi_align_with_as_many_samples_as_each_region_needs(mode):
    rng = np.random.default_rng(0)
    regions = np.float32([[0.3, 0.2, 7.6, 8.1], [1.1, 2.3, 3.4, 3.9], [-2.2, -1.7, 5.3, 6.1]])
    settings = f'output_height=2, output_width=3, spatial_scale=0.9, coordinate_transformation_mode="{mode}"'  # sampling_ratio=0
    inputs = {"x": rng.standard_normal((2, 3, 9, 8)).astype(np.float32), "rois": regions, "i": I64([0, 1, 1])}
    check("float[2,3,9,8] x, float[3,4] rois, int64[3] i", f"y = RoiAlign<{settings}>(x, rois, i)", inputs, order=1, wrt=["x"])


@pytest.mark.parametrize("size", ["9,8", "H,W"])
def test_max_roi_pool(size):
    """Regions inside, over the edge, smaller than their bins and off the image; onnx has no reference for this operator."""
    rng = np.random.default_rng(0)
    x = rng.permutation(2 * 3 * 9 * 8).reshape(2, 3, 9, 8).astype(np.float32)
    regions = np.float32([[0, 0, 0, 15, 13], [1, 3, 4, 9, 6], [1, 2, 2, 3, 2], [0, 12, 8, 30, 40], [1, 50, 50, 60, 60]])
    g = rng.standard_normal((5, 3, 2, 3)).astype(np.float32)
    expected_y, expected = np.zeros_like(g), np.zeros_like(x)
    for r, (image, *corners) in enumerate(regions):
        x1, y1, x2, y2 = np.floor(np.array(corners) * 0.5 + 0.5)
        for c, i, j in np.ndindex(3, 2, 3):
            height, width = max(y2 - y1 + 1, 1) / 2, max(x2 - x1 + 1, 1) / 3
            rows = range(max(int(y1 + np.floor(i * height)), 0), min(int(y1 + np.ceil((i + 1) * height)), 9))
            columns = range(max(int(x1 + np.floor(j * width)), 0), min(int(x1 + np.ceil((j + 1) * width)), 8))
            places = [(int(image), c, row, column) for row in rows for column in columns]
            if places:
                best = max(places, key=lambda place: x[place])
                expected_y[r, c, i, j] = x[best]
                expected[best] += g[r, c, i, j]
    body = "y = MaxRoiPool<pooled_shape = [2, 3], spatial_scale = 0.5>(x, rois)"
    got = gradients(f"float[2,3,{size}] x, float[5,5] rois", body, {"x": x, "rois": regions, "y_grad": g}, wrt=["x"])
    np.testing.assert_array_equal(got["y"], expected_y)
    np.testing.assert_allclose(got["x_grad"], expected, rtol=1e-6)


@pytest.mark.parametrize("scale", ["0.5, 2.0, 4.0", "0.5"])
def test_scaler(scale):
    """What scikit-learn's StandardScaler becomes, in front of a network, without a word of its shape."""
    offset = ", ".join(["1.0"] * (scale.count(",") + 1))
    text = f"""<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 1]> g (float[N, 3] x) => (float[N, 2] y) <float[3, 2] w = {{1, 2, 3, 4, 5, 6}}>
        {{ s = ai.onnx.ml.Scaler<offset = [{offset}], scale = [{scale}]>(x) t = Tanh(s) y = MatMul(t, w) }}"""
    random = np.random.default_rng(0)
    x, g = random.standard_normal((4, 3)).astype(np.float32), random.standard_normal((4, 2)).astype(np.float32)
    got = run(build_gradient_graph(onnx.parser.parse_model(text)), {"x": x, "y_grad": g})
    w, factor = np.arange(1.0, 7.0).reshape(3, 2), np.float64(scale.split(","))
    tanh = np.tanh((x - 1) * factor)
    np.testing.assert_allclose(got["y"], tanh @ w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["w_grad"], tanh.T @ g, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["x_grad"], g @ w.T * (1 - tanh**2) * factor, rtol=1e-4, atol=1e-5)


def test_every_operator_of_the_standard_has_a_gradient_or_has_none():
    """A rule, a body of operators that have one, or a place on the list of those without a gradient."""
    from symbolics.gradients import COMPOSITES, FLAT, IN_INTEGERS, NONDIFFERENTIABLE, RULES

    known = {key[1] if isinstance(key, tuple) else key for key in (*RULES, *COMPOSITES, *FLAT, *IN_INTEGERS, *NONDIFFERENTIABLE)}
    schemas = [s for s in onnx.defs.get_all_schemas() if s.domain == "" and not s.deprecated]
    assert len(schemas) > 190
    lacking = [s.name for s in schemas if s.name not in known and not (s.has_function or s.has_context_dependent_function)]
    assert not lacking, f"{lacking}: write a rule (CONTRIBUTING.md, Add a gradient rule), or name them in nondifferentiable.py"


def _deform_conv(x: np.ndarray, w: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """One image, one channel, no padding, in float64 throughout: the evaluator's sampling grid is float32."""
    (kh, kw), (oh, ow), (height, width) = w.shape, offset.shape[1:], x.shape
    y = np.zeros((oh, ow))
    for i, j, a, b in np.ndindex(oh, ow, kh, kw):
        py, px = np.array([i + a, j + b]) + offset[2 * (a * kw + b) : 2 * (a * kw + b) + 2, i, j]
        for yy, xx in ((int(np.floor(py)) + p, int(np.floor(px)) + q) for p in (0, 1) for q in (0, 1)):
            if 0 <= yy < height and 0 <= xx < width:
                y[i, j] += (1 - abs(py - yy)) * (1 - abs(px - xx)) * w[a, b] * x[yy, xx]
    return y


def test_deform_conv_against_differences_in_float64():
    rng = np.random.default_rng(0)
    places = rng.uniform(0.2, 0.8, (8, 2, 2)) * rng.choice([-1, 1], (8, 2, 2))  # away from the kinks
    inputs, g = [rng.standard_normal((3, 3)), rng.standard_normal((2, 2)), places], rng.standard_normal((2, 2))
    inputs, g = [v.astype(np.float32).astype(np.float64) for v in inputs], g.astype(np.float32)
    feeds = {n: v.astype(np.float32).reshape(s) for n, v, s in zip("xwo", inputs, [(1, 1, 3, 3), (1, 1, 2, 2), (1, 8, 2, 2)])}
    signature = "float[1,1,3,3] x, float[1,1,2,2] w, float[1,8,2,2] o"
    found = gradients(signature, "y = DeformConv(x, w, o)", {**feeds, "y_grad": g.reshape(1, 1, 2, 2)})
    for k, name in enumerate("xwo"):
        expected = np.zeros_like(inputs[k])
        for place in np.ndindex(expected.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [v.copy() for v in inputs]
                moved[k][place] += step
                ends.append((_deform_conv(*moved) * g).sum())
            expected[place] = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(found[f"{name}_grad"].reshape(expected.shape), expected, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("length", ["5", "N"])
@pytest.mark.parametrize("axis", [0, 1])
def test_blocked_quantization(axis, length):
    """Blocks of 2 along an axis of 5, the last one short: int8 weights, trainable scales; then a fake quantizer with both."""
    shape, scales = ((length, 3), (3, 3)) if axis == 0 else ((3, length), (3, 3))
    sizes = [5 if d == length else int(d) for d in shape]
    rng = np.random.default_rng(0)
    w = rng.integers(-9, 9, sizes).astype(np.int8)
    s, z = rng.uniform(0.5, 2, scales), rng.integers(-3, 3, scales).astype(np.int8)
    head = f"int8[{','.join(map(str, shape))}] w, float[3,3] s, int8[3,3] z"
    node = f"<axis = {axis}, block_size = 2>"
    g = rng.standard_normal(sizes).astype(np.float32)
    got = gradients(head, f"y = DequantizeLinear {node} (w, s, z)", {"w": w, "s": s.astype(np.float32), "z": z, "y_grad": g})
    blocks = [2, 2, 1]
    repeated = np.repeat(z, blocks, axis)
    expected = np.add.reduceat(g * (w.astype(float) - repeated), [0, 2, 4], axis)
    np.testing.assert_allclose(got["s_grad"], expected, rtol=1e-5)
    head = f"float[{','.join(map(str, shape))}] x, float[3,3] s"
    x = rng.uniform(-50, 50, sizes).astype(np.float32)
    body = f"q = QuantizeLinear {node} (x, s) y = DequantizeLinear {node} (q, s)"
    got = gradients(head, body, {"x": x, "s": s.astype(np.float32), "y_grad": g})
    ratio = x / np.repeat(s, blocks, axis)
    level = np.round(ratio)
    inside = (level >= 0) & (level <= 255)  # without a zero point onnx quantizes to uint8
    assert inside.any()
    assert not inside.all()
    np.testing.assert_allclose(got["x_grad"], np.where(inside, g, 0), rtol=1e-5)
    # LSQ, arXiv 1902.08153, equation 3.
    slope = np.where(inside, level - ratio, np.clip(level, 0, 255))
    np.testing.assert_allclose(got["s_grad"], np.add.reduceat(g * slope, [0, 2, 4], axis), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "body",
    [
        "i = Constant<value = int64 {1}>() a = Transpose<perm = [1, 0, 2]>(x) t = Gather<axis = 0>(a, i) y = Transpose<perm = [1, 0]>(t)",
        "s = Constant<value = int64[1] {1}>() e = Constant<value = int64[1] {2}>() o = Constant<value = int64[1] {0}>() a = Transpose<perm = [1, 0, 2]>(x) "
        "c = Slice(a, s, e, o) t = Squeeze(c, o) y = Transpose<perm = [1, 0]>(t)",
    ],
    ids=["Gather", "Slice"],
)
def test_zeros_around_a_part_in_front_of_onnxruntimes_optimizer(body):
    seed = np.arange(8, dtype=np.float32).reshape(4, 2)
    found = gradients("float[2,3,4] x", body, {"x": np.zeros((2, 3, 4), np.float32), "y_grad": seed})["x_grad"]
    expected = np.zeros((2, 3, 4), np.float32)
    expected[:, 1] = seed.T
    np.testing.assert_array_equal(found, expected)


def test_computed_pads_along_some_axes():
    body = "zero = Constant<value = float {0}>() a = Constant<value_ints = [2, 0]>() y = Pad(x, p, zero, a)"
    seed = np.arange(30, dtype=np.float32).reshape(3, 2, 5)
    feeds = {"x": np.zeros((2, 2, 3), np.float32), "p": np.array([1, 0, 1, 1], I64), "y_grad": seed}
    np.testing.assert_array_equal(gradients("float[2,2,3] x, int64[4] p", body, feeds)["x_grad"], seed[:2, :, 1:4])


#: Where a formula divides by nothing, meets a tie or saturates: x, and the gradient for it where that for y is ones.
EDGES = {
    "LpNormalization of zeros": ("y = LpNormalization<p = 2>(x)", [0, 0, 0], [0, 0, 0]),
    "LpNormalization of zeros, p = 1": ("y = LpNormalization<p = 1>(x)", [0, 0, 0], [0, 0, 0]),
    "ReduceL2 of zeros": ("a = Constant<value_ints = [0]>() y = ReduceL2(x, a)", [0, 0, 0], [0, 0, 0]),
    "ReduceLogSumExp, saturated": ("a = Constant<value_ints = [0]>() y = ReduceLogSumExp(x, a)", [100, 0, 100], [0.5, 0, 0.5]),
    "ReduceMax of ties": ("a = Constant<value_ints = [0]>() y = ReduceMax(x, a)", [2, 2, 1], [0.5, 0.5, 0]),
    "ReduceProd with a zero": ("a = Constant<value_ints = [0]>() y = ReduceProd(x, a)", [0, 2, 3], [6, 0, 0]),
    "Softplus, saturated": ("y = Softplus(x)", [-100, 0, 100], [0, 0.5, 1]),
    "Abs at zero": ("y = Abs(x)", [-1, 0, 2], [-1, 0, 1]),
}


@pytest.mark.parametrize("case", EDGES)
def test_at_the_edge(case):
    body, x, expected = EDGES[case]
    seed = np.ones(1 if "Reduce" in case else 3, np.float32)
    found = gradients("float[3] x", body, {"x": np.array(x, np.float32), "y_grad": seed})["x_grad"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
