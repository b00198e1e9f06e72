"""Operators as files of opsets before 18 have them: a small model for each way in which an operator changed since."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ROWS", "UNTRIED", "Row"]


@dataclass(frozen=True)
class Row:
    """A body from ``first`` to ``last``, the opsets that have it in these words."""

    first: int
    last: int
    body: str
    inputs: str = "float[2,3,4] x"
    outputs: str = "float[?] y"
    weights: str = ""
    refused: str = ""  # with these words

    def text(self, opset: int) -> str:
        outputs = ", ".join(f"{each.split('[')[0]} {each.split()[-1]}" for each in self.outputs.split(", "))
        return f'<ir_version: 8, opset_import: ["": {opset}]> g ({self.inputs}) => ({outputs}) <{self.weights}> {{ {self.body} }}'


IMAGE = "float[1,2,4,6] x"
_BY_NAME = "Abs Ceil Exp Floor Neg Relu Sigmoid Tanh Softmax LogSoftmax Hardmax Erf Sign Sinh Cosh Asinh Round HardSwish Celu Identity LeakyRelu".split()
_SINCE = {"Erf": 9, "Sign": 9, "Sinh": 9, "Cosh": 9, "Asinh": 9, "Round": 11, "HardSwish": 14, "Celu": 12}
_SAMPLED = "s = Constant<value = float[4] {{1.0, 1.0, {}, {}}}>() "
_REDUCTIONS = "ReduceL1 ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare".split()
_POOL = "kernel_shape = [3, 2], strides = [2, 1], pads = [1, 0, 1, 1]"


def _rows() -> dict[str, Row]:
    rows = {name: Row(_SINCE.get(name, 7), 17, f"y = {name}(x)") for name in _BY_NAME}
    rows |= {name: Row(7, 17, f"a = Abs(x) y = {name}(a)") for name in ("Sqrt", "Log", "Reciprocal")}
    rows["Atanh"] = Row(9, 17, "a = Tanh(x) y = Atanh(a)")
    rows["Acosh"] = Row(9, 17, "a = Abs(x) o = Constant<value = float {1.5}>() b = Add(a, o) y = Acosh(b)")
    for name in ("Softmax", "LogSoftmax", "Hardmax"):
        for axis in range(3):
            rows[f"{name} axis {axis}"] = Row(7, 17, f"y = {name}<axis = {axis}>(x)")
        rows[f"{name} axis -2"] = Row(11, 17, f"y = {name}<axis = -2>(x)")
        rows[f"{name} open"] = Row(7, 17, f"y = {name}<axis = 1>(x)", inputs="float[a,b,c] x")
        rows[f"{name} in an If"] = Row(
            11, 17, f"y = If(c) <then_branch = t () => (float[2,3,4] u) {{ u = {name}<axis = 1>(x) }},"
            f" else_branch = e () => (float[2,3,4] v) {{ z = Neg(x) v = {name}<axis = 0>(z) }}>", inputs="float[2,3,4] x, bool c",
        )  # fmt: skip
    for mode in ("nearest", "linear"):
        for factors in ((2.0, 2.0), (1.5, 2.5), (0.6, 0.5), (3.0, 0.7)):
            label, scales = f"{mode} {factors}", _SAMPLED.format(*factors)
            if min(factors) >= 1:
                rows[f"Upsample-7 {label}"] = Row(
                    7, 8, f'y = Upsample<mode = "{mode}", scales = [1.0, 1.0, {factors[0]}, {factors[1]}]>(x)', IMAGE
                )
            if min(factors) >= 1:
                rows[f"Upsample {label}"] = Row(9, 9, f'{scales} y = Upsample<mode = "{mode}">(x, s)', IMAGE)
            rows[f"Resize-10 {label}"] = Row(10, 10, f'{scales} y = Resize<mode = "{mode}">(x, s)', IMAGE)
            rows[f"Resize {label}"] = Row(
                11, 17, f'r = Constant<value = float[0] {{}}>() {scales} y = Resize<mode = "{mode}">(x, r, s)', IMAGE
            )
        rows[f"Upsample given {mode}"] = Row(
            9, 9, f'y = Upsample<mode = "{mode}">(x, s)', IMAGE, weights="float[4] s = {1.0, 1.0, 1.5, 2.0}"
        )
        rows[f"Resize-10 given {mode}"] = Row(
            10, 10, f'y = Resize<mode = "{mode}">(x, s)', IMAGE, weights="float[4] s = {1.0, 1.0, 1.5, 2.0}"
        )
        rows[f"Resize-10 computed {mode}"] = Row(
            10, 10, f's = Abs(t) y = Resize<mode = "{mode}">(x, s)', IMAGE, weights="float[4] t = {1.0, 1.0, -1.5, 2.0}"
        )
        rows[f"Resize-10 open {mode}"] = Row(
            10, 10, f'a = Abs(x) y = Resize<mode = "{mode}">(a, s)', "float[n,c,h,w] x", weights="float[4] s = {1.0, 1.0, 1.5, 2.0}"
        )
        rows[f"Resize-10 in an If {mode}"] = Row(
            10, 10, f'y = If(c) <then_branch = t () => (float[1,2,e,f] p) {{ p = Resize<mode = "{mode}">(x, s) }},'
            f' else_branch = e () => (float[1,2,i,j] q) {{ q = Resize<mode = "{mode}">(x, t) }}>', "float[1,2,4,6] x, bool c",
            weights="float[4] s = {1.0, 1.0, 1.5, 2.0}, float[4] t = {1.0, 1.0, 1.6, 2.1}",
        )  # fmt: skip
    rows["Upsample plain"] = Row(9, 9, _SAMPLED.format(2.0, 1.5) + "y = Upsample(x, s)", IMAGE)
    rows["Resize plain"] = Row(10, 10, _SAMPLED.format(2.0, 1.5) + "y = Resize(x, s)", IMAGE)
    rows["Upsample 1-d"] = Row(9, 9, 's = Constant<value = float[3] {1.0, 1.0, 2.5}>() y = Upsample<mode = "linear">(x, s)')
    for where in ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel", "tf_half_pixel_for_nn"):
        for mode in ("nearest", "linear", "cubic"):
            if where != "tf_half_pixel_for_nn" or mode == "nearest":
                rows[f"Resize {mode} {where}"] = Row(
                    11, 12 if where.startswith("tf") else 17, f'r = Constant<value = float[0] {{}}>() {_SAMPLED.format(1.5, 0.7)}'
                    f'y = Resize<mode = "{mode}", coordinate_transformation_mode = "{where}">(x, r, s)', IMAGE,
                )  # fmt: skip
    rows["Resize sizes"] = Row(13, 17, 'z = Constant<value = int64[4] {1, 2, 7, 3}>() y = Resize<mode = "linear">(x, , , z)', IMAGE)
    rows["Resize-11 sizes"] = Row(
        11,
        12,
        'e = Constant<value = float[0] {}>() z = Constant<value = int64[4] {1, 2, 7, 3}>() y = Resize<mode = "linear">(x, e, e, z)',
        IMAGE,
    )
    rows["Resize crop"] = Row(
        11, 17, 'r = Constant<value = float[8] {0.0, 0.0, 0.1, 0.2, 1.0, 1.0, 0.8, 1.3}>() s = Constant<value = float[4] {1.0, 1.0, 1.5, 2.0}>()'
        'y = Resize<mode = "linear", coordinate_transformation_mode = "tf_crop_and_resize", extrapolation_value = 3.0>(x, r, s)', IMAGE,
    )  # fmt: skip
    for name in _REDUCTIONS:
        rows[name] = Row(7, 17, f"y = {name}(x)")
        rows[f"{name} plain"] = Row(7, 17, f"y = {name}<keepdims = 0>(x)")
        rows[f"{name} axes"] = Row(7, 12 if name == "ReduceSum" else 17, f"y = {name}<axes = [1, 2], keepdims = 0>(x)")
        rows[f"{name} from the end"] = Row(11, 12 if name == "ReduceSum" else 17, f"y = {name}<axes = [-1]>(x)")
    rows["ReduceLogSum"] = Row(7, 17, "a = Abs(x) y = ReduceLogSum<axes = [1], keepdims = 0>(a)")
    rows["ReduceSum input"] = Row(13, 17, "a = Constant<value = int64[1] {1}>() y = ReduceSum<keepdims = 0>(x, a)")
    rows["ReduceSum none"] = Row(13, 17, "a = Constant<value = int64[0] {}>() y = ReduceSum<keepdims = 0, noop_with_empty_axes = 1>(x, a)")
    rows["ArgMax"] = Row(7, 17, "y = ArgMax<axis = 1, keepdims = 0>(x)", outputs="int64[?] y")
    rows["ArgMin"] = Row(7, 17, "y = ArgMin<axis = 2>(x)", outputs="int64[?] y")
    rows["ArgMax last"] = Row(12, 17, "r = Round(x) y = ArgMax<axis = -1, select_last_index = 1>(r)", outputs="int64[?] y")
    for name in ("Add", "Sub", "Mul", "Div", "Pow"):
        rows[name] = Row(7, 17, f"a = Exp(x) y = {name}(a, w)", "float[2,3,4] x, float[3,1] w")
    for name in ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"):
        rows[name] = Row(
            {"Equal": 11}.get(name, 12 if name.endswith("OrEqual") else 9),
            17,
            f"y = {name}(x, w)",
            "float[2,3,4] x, float[3,1] w",
            "bool[?] y",
        )
    rows["Greater-7"] = Row(7, 8, "y = Greater(x, w)", "float[2,3,4] x, float[3,1] w", "bool[?] y")
    rows["Less-7"] = Row(7, 8, "y = Less(x, w)", "float[2,3,4] x, float[3,1] w", "bool[?] y")
    for name in ("Max", "Min", "Mean", "Sum"):
        rows[name] = Row(8, 17, f"y = {name}(x, w, v)", "float[2,3,4] x, float[3,1] w, float[4] v")
        rows[f"{name}-6"] = Row(7, 7, f"y = {name}(x, w)", "float[2,3,4] x, float[2,3,4] w")
    rows["Mod"] = Row(10, 17, "y = Mod<fmod = 1>(x, w)", "float[2,3,4] x, float[3,1] w")
    rows["PRelu"] = Row(7, 17, "y = PRelu(x, w)", "float[2,3,4] x, float[3,1] w")
    rows["PRelu last"] = Row(7, 17, "y = PRelu(x, w)", "float[2,3,4] x, float[4] w")
    rows["MatMul"] = Row(7, 17, "y = MatMul(x, w)", "float[2,3,4] x, float[4,5] w")
    rows["Gemm"] = Row(7, 17, "y = Gemm<alpha = 0.5, beta = 2.0, transB = 1>(x, w, c)", "float[2,3] x, float[4,3] w, float[4] c")
    rows["Gemm column"] = Row(7, 17, "y = Gemm<transA = 1>(x, w, c)", "float[3,2] x, float[3,4] w, float[2,1] c")
    rows["Gemm two"] = Row(11, 17, "y = Gemm(x, w)", "float[2,3] x, float[3,4] w")
    rows["Conv"] = Row(7, 17, 'y = Conv<auto_pad = "SAME_LOWER", strides = [2, 2]>(x, w)', "float[1,2,5,6] x, float[3,2,2,3] w")
    rows["Conv plain"] = Row(7, 17, "y = Conv(x, w, b)", "float[1,2,5,6] x, float[3,2,2,3] w, float[3] b")
    rows["ConvTranspose"] = Row(
        7, 17, "y = ConvTranspose<strides = [2, 1], output_padding = [1, 0]>(x, w)", "float[1,2,3,4] x, float[2,3,2,3] w"
    )
    rows["ConvTranspose shape"] = Row(
        7, 17, "y = ConvTranspose<strides = [2, 2], output_shape = [8, 9]>(x, w)", "float[1,2,3,4] x, float[2,1,3,3] w"
    )
    rows["AveragePool"] = Row(7, 17, f"y = AveragePool<{_POOL}>(x)", IMAGE)
    rows["AveragePool counting"] = Row(7, 17, f"y = AveragePool<{_POOL}, count_include_pad = 1>(x)", IMAGE)
    rows["AveragePool same"] = Row(7, 17, 'y = AveragePool<kernel_shape = [3, 3], strides = [2, 2], auto_pad = "SAME_UPPER">(x)', IMAGE)
    rows["AveragePool ceil"] = Row(10, 17, "y = AveragePool<kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1>(x)", IMAGE)
    rows["MaxPool"] = Row(7, 17, f"y = MaxPool<{_POOL}>(x)", IMAGE)
    rows["MaxPool places"] = Row(8, 17, f"y, i = MaxPool<{_POOL}>(x)", IMAGE, "float[?] y, int64[?] i")
    rows["MaxPool dilated"] = Row(
        10, 17, "y = MaxPool<kernel_shape = [2, 2], dilations = [2, 1], ceil_mode = 1, strides = [2, 2]>(x)", IMAGE
    )
    rows["MaxUnpool"] = Row(
        9,
        17,
        "a, i = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) y = MaxUnpool<kernel_shape = [2, 2], strides = [2, 2]>(a, i)",
        IMAGE,
    )
    rows["LpPool"] = Row(7, 17, f"a = Abs(x) y = LpPool<{_POOL}, p = 3>(a)", IMAGE)
    rows["LRN"] = Row(7, 17, "y = LRN<size = 3, alpha = 0.5>(x)", "float[1,5,2,2] x")
    bn = "float[2,3,4] x, float[3] s, float[3] b, float[3] m"
    rows["BatchNormalization"] = Row(7, 17, "v = Abs(s) y = BatchNormalization<epsilon = 0.01>(x, s, b, m, v)", bn)
    rows["BatchNormalization trained"] = Row(
        14,
        17,
        "v = Abs(s) y, p, q = BatchNormalization<training_mode = 1, momentum = 0.7>(x, s, b, m, v)",
        bn,
        "float[?] y, float[?] p, float[?] q",
    )
    rows["BatchNormalization five"] = Row(
        7, 13, "v = Abs(s) y, p, q, t, u = BatchNormalization<momentum = 0.7>(x, s, b, m, v)", bn, "float[?] y", refused="outputs 4 and 5",
    )  # fmt: skip
    rows["BatchNormalization all but spatial"] = Row(
        7, 8, "v = Abs(s) y = BatchNormalization<spatial = 0>(x, s, b, m, v)", "float[2,3,4] x, float[3,4] s, float[3,4] b, float[3,4] m",
        refused="spatial",
    )  # fmt: skip
    rows["LayerNormalization"] = Row(17, 17, "y = LayerNormalization(x, w)", "float[2,3,4] x, float[4] w")
    rows["MeanVarianceNormalization"] = Row(9, 17, "y = MeanVarianceNormalization(x)", IMAGE)
    rows["Dropout"] = Row(7, 11, "y = Dropout<ratio = 0.5>(x)")
    rows["Dropout plain"] = Row(7, 17, "y = Dropout(x)")
    rows["Dropout mask"] = Row(10, 17, "y, m = Dropout(x)", outputs="float[?] y, bool[?] m")
    rows["Dropout mask of numbers"] = Row(7, 9, "y, m = Dropout(x)", outputs="float[?] y, float[?] m")
    rows["Dropout mask read"] = Row(7, 9, "a, m = Dropout(x) b = Add(a, m) y = Exp(b)")
    for name in ("Softmax", "LogSoftmax", "Hardmax"):
        rows[f"{name} empty"] = Row(7, 17, f"y = {name}<axis = 1>(x)", inputs="float[2,3,0] x")
    rows["Dropout-12"] = Row(12, 17, "r = Constant<value = float {0.5}>() f = Constant<value = bool {0}>() y = Dropout(x, r, f)")
    rows["Clip"] = Row(7, 10, "y = Clip<min = -0.5, max = 0.5>(x)")
    rows["Clip above"] = Row(7, 10, "y = Clip<max = 0.5>(x)")
    rows["Clip below"] = Row(7, 10, "y = Clip<min = 0.5>(x)")
    rows["Clip none"] = Row(7, 17, "y = Clip(x)")
    rows["Clip-11"] = Row(11, 17, "a = Constant<value = float {0.1}>() y = Clip(x, , a)")
    for mode in ("constant", "reflect", "edge"):
        rows[f"Pad-2 {mode}"] = Row(7, 10, f'y = Pad<mode = "{mode}", pads = [0, 1, 2, 1, 0, 1], value = 2.5>(x)')
        rows[f"Pad {mode}"] = Row(11, 17, f'p = Constant<value = int64[6] {{0, 1, 2, 1, 0, 1}}>() y = Pad<mode = "{mode}">(x, p)')
    rows["Pad cut"] = Row(7, 10, "y = Pad<pads = [0, -1, 2, 1, 0, -1]>(x)")
    rows["Pad value"] = Row(
        11, 17, "p = Constant<value = int64[6] {0, 1, 2, 1, 0, 1}>() v = Constant<value = float {2.5}>() y = Pad(x, p, v)"
    )
    rows["Slice"] = Row(7, 9, "y = Slice<starts = [-2, 1], ends = [99999, -1], axes = [1, 2]>(x)")
    rows["Slice all"] = Row(7, 9, "y = Slice<starts = [0, 1], ends = [1, 2]>(x)")
    rows["Slice-10"] = Row(
        10,
        17,
        "a = Constant<value = int64[1] {-1}>() b = Constant<value = int64[1] {-5}>() c = Constant<value = int64[1] {2}>() d = Constant<value = int64[1] {-2}>() y = Slice(x, a, b, c, d)",
    )
    rows["TopK"] = Row(7, 9, "y, i = TopK<k = 2, axis = 1>(x)", outputs="float[?] y, int64[?] i")
    rows["TopK plain"] = Row(7, 9, "y, i = TopK<k = 2>(x)", outputs="float[?] y, int64[?] i")
    rows["TopK-10"] = Row(10, 17, "k = Constant<value = int64[1] {2}>() y, i = TopK<axis = 1>(x, k)", outputs="float[?] y, int64[?] i")
    rows["TopK-11"] = Row(
        11, 17, "k = Constant<value = int64[1] {2}>() y, i = TopK<largest = 0, axis = -2>(x, k)", outputs="float[?] y, int64[?] i"
    )
    rows["Squeeze"] = Row(7, 12, "u = Unsqueeze<axes = [0, 3]>(x) y = Squeeze<axes = [3]>(u)")
    rows["Squeeze all"] = Row(7, 12, "u = Unsqueeze<axes = [0, 3]>(x) y = Squeeze(u)")
    rows["Squeeze from the end"] = Row(11, 12, "u = Unsqueeze<axes = [-1]>(x) y = Squeeze<axes = [-1]>(u)")
    rows["Squeeze-13"] = Row(13, 17, "a = Constant<value = int64[2] {0, -1}>() u = Unsqueeze(x, a) y = Squeeze(u, a)")
    rows["Split"] = Row(7, 12, "y, z = Split<axis = 2, split = [1, 3]>(x)", outputs="float[?] y, float[?] z")
    rows["Split even"] = Row(7, 17, "y, z = Split<axis = 2>(x)", outputs="float[?] y, float[?] z")
    rows["Split plain"] = Row(7, 17, "y, z = Split(x)", outputs="float[?] y, float[?] z")
    rows["Split-13"] = Row(
        13, 17, "n = Constant<value = int64[2] {1, 3}>() y, z = Split<axis = -1>(x, n)", outputs="float[?] y, float[?] z"
    )
    rows["Concat"] = Row(7, 17, "y = Concat<axis = 1>(x, x)")
    rows["Flatten"] = Row(7, 17, "y = Flatten<axis = 2>(x)")
    rows["Flatten none"] = Row(9, 17, "y = Flatten<axis = 0>(x)")
    rows["Reshape"] = Row(7, 17, "s = Constant<value = int64[2] {0, -1}>() y = Reshape(x, s)")
    rows["Reshape empty"] = Row(14, 17, "s = Constant<value = int64[2] {0, 5}>() y = Reshape<allowzero = 1>(x, s)", "float[0,3] x")
    rows["Transpose"] = Row(7, 17, "y = Transpose<perm = [2, 0, 1]>(x)")
    rows["Tile"] = Row(7, 17, "r = Constant<value = int64[3] {1, 2, 3}>() y = Tile(x, r)")
    rows["Expand"] = Row(8, 17, "r = Constant<value = int64[3] {2, 1, 4}>() y = Expand(x, r)", "float[3,1] x")
    rows["Shape"] = Row(7, 17, "y = Shape(x)", outputs="int64[?] y")
    rows["Shape part"] = Row(15, 17, "y = Shape<start = 1>(x)", outputs="int64[?] y")
    rows["Size"] = Row(7, 17, "y = Size(x)", outputs="int64[?] y")
    rows["Gather"] = Row(7, 17, "i = Constant<value = int64[2] {2, 0}>() y = Gather<axis = 1>(x, i)")
    rows["Gather from the end"] = Row(11, 17, "i = Constant<value = int64 {-1}>() y = Gather<axis = -1>(x, i)")
    rows["GatherElements"] = Row(11, 17, "i = Constant<value = int64[1,2] {1, 0}>() y = GatherElements<axis = 0>(x, i)", "float[2,3] x")
    rows["GatherND"] = Row(11, 17, "i = Constant<value = int64[1,2] {1, 0}>() y = GatherND(x, i)")
    rows["GatherND batch"] = Row(12, 17, "i = Constant<value = int64[2,1] {1, 0}>() y = GatherND<batch_dims = 1>(x, i)")
    scattered = "i = Constant<value = int64[2,2] {0, 2, 1, 0}>() "
    pair = "float[2,3] x, float[2,2] u"
    rows["Scatter"] = Row(9, 10, scattered + "y = Scatter<axis = 1>(x, i, u)", pair)
    rows["ScatterElements"] = Row(11, 17, scattered + "y = ScatterElements<axis = 1>(x, i, u)", pair)
    rows["ScatterElements add"] = Row(16, 17, scattered + 'y = ScatterElements<axis = 1, reduction = "add">(x, i, u)', pair)
    rows["ScatterND"] = Row(11, 17, "i = Constant<value = int64[2,1] {2, 0}>() y = ScatterND(x, i, u)", "float[4,3] x, float[2,3] u")
    rows["ScatterND mul"] = Row(
        16, 17, 'i = Constant<value = int64[2,1] {2, 2}>() y = ScatterND<reduction = "mul">(x, i, u)', "float[4,3] x, float[2,3] u"
    )
    rows["OneHot"] = Row(
        9, 17, "i = Constant<value = int64[2] {1, 0}>() d = Constant<value = int64[1] {3}>() y = OneHot(i, d, x)", "float[2] x"
    )
    rows["Compress"] = Row(9, 17, "c = Constant<value = bool[3] {1, 0, 1}>() y = Compress<axis = 1>(x, c)")
    rows["Where"] = Row(9, 17, "c = Constant<value = bool[4] {1, 0, 1, 0}>() z = Neg(x) y = Where(c, x, z)")
    rows["NonZero"] = Row(9, 17, "y = NonZero(x)", outputs="int64[?] y")
    rows["CumSum"] = Row(11, 17, "a = Constant<value = int32 {1}>() y = CumSum<reverse = 1, exclusive = 1>(x, a)")
    rows["DepthToSpace"] = Row(7, 17, "y = DepthToSpace<blocksize = 2>(x)", "float[1,8,2,3] x")
    rows["DepthToSpace CRD"] = Row(11, 17, 'y = DepthToSpace<blocksize = 2, mode = "CRD">(x)', "float[1,8,2,3] x")
    rows["SpaceToDepth"] = Row(7, 17, "y = SpaceToDepth<blocksize = 2>(x)", IMAGE)
    rows["Trilu"] = Row(14, 17, "y = Trilu<upper = 0>(x)")
    rows["ReverseSequence"] = Row(10, 17, "n = Constant<value = int64[3] {1, 2, 2}>() y = ReverseSequence(x, n)")
    rows["Unique"] = Row(11, 17, "y = Unique(x)")
    rows["Cast"] = Row(7, 17, "i = Cast<to = 7>(x) y = Cast<to = 1>(i)")
    rows["CastLike"] = Row(15, 17, "i = Constant<value = int64 {1}>() j = CastLike(x, i) y = CastLike(j, x)")
    rows["Constant"] = Row(7, 17, "c = Constant<value = float[4] {1.0, 2.0, 3.0, 4.0}>() y = Mul(x, c)")
    rows["Constant numbers"] = Row(12, 17, "c = Constant<value_floats = [1.0, 2.0, 3.0, 4.0]>() y = Mul(x, c)")
    rows["ConstantOfShape"] = Row(9, 17, "s = Shape(x) c = ConstantOfShape<value = float[1] {2.0}>(s) y = Mul(x, c)")
    rows["EyeLike"] = Row(9, 17, "e = EyeLike<k = 1>(x) y = Mul(x, e)", "float[2,3] x")
    rows["Range"] = Row(
        11,
        17,
        "a = Constant<value = float {0.0}>() b = Constant<value = float {4.0}>() c = Constant<value = float {1.0}>() r = Range(a, b, c) y = Mul(x, r)",
    )
    rows["Einsum"] = Row(12, 17, 'y = Einsum<equation = "abc,cd->abd">(x, w)', "float[2,3,4] x, float[4,5] w")
    rows["Det"] = Row(11, 17, "y = Det(x)", "float[2,3,3] x")
    rows["Shrink"] = Row(9, 17, "y = Shrink<lambd = 0.3, bias = 0.1>(x)")
    rows["ThresholdedRelu"] = Row(10, 17, "y = ThresholdedRelu<alpha = 0.3>(x)")
    rows["IsNaN"] = Row(9, 17, "y = IsNaN(x)", outputs="bool[?] y")
    rows["IsInf"] = Row(10, 17, "y = IsInf(x)", outputs="bool[?] y")
    loss = "t = Constant<value = int64[2] {1, 0}>() "
    rows["NegativeLogLikelihoodLoss"] = Row(12, 17, loss + 'y = NegativeLogLikelihoodLoss<reduction = "sum">(x, t)', "float[2,3] x")
    rows["SoftmaxCrossEntropyLoss"] = Row(12, 17, loss + "y = SoftmaxCrossEntropyLoss(x, t)", "float[2,3] x")
    roi = "r = Constant<value = float[1,4] {0.0, 0.0, 4.0, 3.5}>() b = Constant<value = int64[1] {0}>() "
    rows["RoiAlign"] = Row(10, 15, roi + "y = RoiAlign<output_height = 2, output_width = 2, sampling_ratio = 2>(x, r, b)", IMAGE)
    rows["RoiAlign-16"] = Row(16, 17, roi + "y = RoiAlign<output_height = 2, output_width = 2, sampling_ratio = 2>(x, r, b)", IMAGE)
    rows["RoiAlign max"] = Row(
        10, 17, roi + 'y = RoiAlign<output_height = 2, output_width = 2, mode = "max", sampling_ratio = 2>(x, r, b)', IMAGE
    )
    rows["GridSample"] = Row(16, 17, "g = Tanh(h) y = GridSample(x, g)", "float[1,2,4,6] x, float[1,3,3,2] h")
    rows["GridSample cubic"] = Row(
        16, 17, 'g = Tanh(h) y = GridSample<mode = "bicubic", padding_mode = "border">(x, g)', "float[1,2,4,6] x, float[1,3,3,2] h"
    )
    rows["NonMaxSuppression"] = Row(
        10, 17, "n = Constant<value = int64[1] {2}>() t = Constant<value = float[1] {0.1}>() y = NonMaxSuppression(b, x, n, t)",
        "float[1,1,3] x", "int64[?] y", "float[1,3,4] b = {0, 0, 1, 1, 0, 0, 1.1, 1, 3, 3, 4, 4}",
    )  # fmt: skip
    rnn = "float[4,2,3] x, float[1,{0},3] w, float[1,{0},2] r, float[1,{1}] b"
    rows["LSTM"] = Row(7, 17, "y, h, c = LSTM<hidden_size = 2>(x, w, r, b)", rnn.format(8, 16), "float[?] y, float[?] h, float[?] c")
    rows["GRU"] = Row(
        7,
        17,
        'y, h = GRU<hidden_size = 2, direction = "reverse", linear_before_reset = 1>(x, w, r, b)',
        rnn.format(6, 12),
        "float[?] y, float[?] h",
    )
    rows["RNN"] = Row(7, 17, "y, h = RNN<hidden_size = 2>(x, w, r, b)", rnn.format(2, 4), "float[?] y, float[?] h")
    rows["DFT"] = Row(17, 17, "y = DFT<axis = 1>(x)", "float[1,4,1] x")
    rows["STFT"] = Row(
        17, 17, "s = Constant<value = int64 {2}>() w = HannWindow(n) y = STFT(x, s, w)", "float[1,8,1] x", weights="int64 n = {4}"
    )
    rows["windows"] = Row(17, 17, "a = BlackmanWindow(n) b = HammingWindow(n) c = Mul(a, b) y = Mul(x, c)", weights="int64 n = {4}")
    rows["QuantizeLinear"] = Row(
        10,
        17,
        "s = Constant<value = float {0.1}>() z = Constant<value = uint8 {120}>() q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)",
    )
    rows["QuantizeLinear axis"] = Row(
        13, 17, "s = Constant<value = float[3] {0.1, 0.2, 0.3}>() z = Constant<value = uint8[3] {120, 3, 9}>()"
        " q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)",
    )  # fmt: skip
    rows["DynamicQuantizeLinear"] = Row(11, 17, "q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z)")
    rows["MatMulInteger"] = Row(
        11, 17, "q, s, z = DynamicQuantizeLinear(x) p = Transpose<perm = [0, 2, 1]>(q) i = MatMulInteger(q, p, z, z) y = Cast<to = 1>(i)"
    )
    rows["If"] = Row(
        7, 17, "y = If(c) <then_branch = t () => (float[2,3,4] u) { u = Exp(x) }, else_branch = e () => (float[2,3,4] v) { v = Neg(x) }>",
        "float[2,3,4] x, bool c",
    )  # fmt: skip
    rows["If with axes"] = Row(
        11, 12, "y = If(c) <then_branch = t () => (float[2,3] u) { u = ReduceSum<axes = [2], keepdims = 0>(x) },"
        " else_branch = e () => (float[2,3] v) { z = Slice(x, a, b, p) v = Squeeze<axes = [2]>(z) }>",
        "float[2,3,4] x, bool c", weights="int64[1] a = {1}, int64[1] b = {2}, int64[1] p = {2}",
    )  # fmt: skip
    rows["Loop"] = Row(
        11, 17, "y = Loop(n, , x) <body = b (int64 i, bool k, float[2,3,4] h) => (bool l, float[2,3,4] o) { l = Identity(k) t = Softmax<axis = 1>(h) o = Add(h, t) }>",
        weights="int64 n = {3}",
    )  # fmt: skip
    rows["Scan"] = Row(
        9, 17, "s, y = Scan<num_scan_inputs = 1, body = b (float[3,4] h, float[3,4] v) => (float[3,4] o, float[3,4] p) { o = Add(h, v) p = Softmax<axis = 0>(o) }>(z, x)",
        "float[2,3,4] x, float[3,4] z", "float[?] y",
    )  # fmt: skip
    rows["Scan-8"] = Row(
        8, 8, "s, y = Scan<num_scan_inputs = 1, body = b (float[4] h, float[4] v) => (float[4] o, float[4] p) { o = Add(h, v) p = Exp(o) }>( , z, x)",
        "float[2,3,4] x, float[2,4] z", "float[?] y", refused="Scan goes over each part of a batch",
    )  # fmt: skip
    return rows


ROWS = _rows()
#: Changed as well, and of no file that has a gradient: texts, sequences, optionals, random numbers, bits; a product of integers alone.
UNTRIED = set(
    "BitShift Bernoulli ConcatFromSequence ConvInteger MelWeightMatrix Optional OptionalGetElement OptionalHasElement QLinearConv QLinearMatMul"
    " SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap SplitToSequence StringNormalizer"
    " TfIdfVectorizer".split()
)
