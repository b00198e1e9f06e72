"""One small model per operator that has a gradient rule with attributes or shapes to get wrong."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import parser

__all__ = ["operator_models"]

# What the lines may read: inputs, and constants.
_INPUTS = "float[R, 4] m, float[1, 2, 4, 4] img, float[4] v, float[2, 3, 4] seq, bool flag"
_CONSTANTS = """float[2, 2, 3, 3] k = {%s}, float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float[2] two = {1, 2}, float[2] var = {1, 2},
    float one = {1}, float half = {0.5}, int64[1] i0 = {0}, int64[1] i1 = {1}, int64[1] i4 = {4}, int64[2] idx = {0, 1}, int64[2, 1] nd = {0, 1}, int64[1, 4] elements = {0, 1, 0, 1},
    int64[4] pads = {0, 1, 0, 1}, int64[2] shape = {-1, 2}, int64[2] reps = {1, 2}, int64[2] big = {3, 4}, int64[4] sizes = {1, 2, 8, 8}, float[4] scales = {1, 1, 2, 2},
    float[1, 12, 4] lw = {%s}, float[1, 12, 3] lr = {%s}, int64 zero = {0}, int64 depth = {4}, float[2] onoff = {0, 1}, float[1, 2, 3] theta = {1, 0, 0, 0, 1, 0}, int64[4] gridsize = {1, 2, 4, 4},
    float[1, 4, 4, 2] grid = {%s}, int64[2] lens = {3, 2}, int64[2] split = {1, 3}, float[1, 4] roi = {0, 0, 2, 2}, int64[2] image = {4, 4}, int64[2] block = {2, 2}, bool[4] cond = {1, 0, 1, 1},
    int64[2] crop = {2, 2}, int64[3] labels = {0, 1, 2}"""
_LINES = """
    Conv<pads = [1, 1, 1, 1], strides = [1, 1], dilations = [1, 1], group = 1>(img, k) | ConvTranspose<output_padding = [0, 0], strides = [2, 2]>(img, k)
    MaxPool<kernel_shape = [2, 2], strides = [1, 1], ceil_mode = 1>(img) | AveragePool<kernel_shape = [2, 2], pads = [1, 1, 0, 0], count_include_pad = 1>(img)
    LpPool<kernel_shape = [2, 2], p = 3>(img) | GlobalAveragePool(img) | GlobalMaxPool(img) | LRN<size = 3, alpha = 0.1>(img)
    BatchNormalization<epsilon = 0.1>(img, two, two, two, var) | InstanceNormalization<epsilon = 0.1>(img, two, two) | Neg(m)
    LayerNormalization<axis = -1>(m, v) | Gemm<alpha = 2.0, transB = 0>(m, w) | MatMul(m, w) | Softmax<axis = 1>(m) | LogSoftmax<axis = -1>(m) | Hardmax(m)
    Gather<axis = 1>(m, idx) | GatherElements<axis = 0>(m, elements) | GatherND<batch_dims = 0>(m, nd) | ScatterElements<axis = 1, reduction = "add">(m, elements, m)
    ScatterND<reduction = "mul">(v, nd, two) | Slice(m, i0, i4, i1, i1) | Concat<axis = 0>(m, m) | Pad<mode = "reflect">(m, pads) | Tile(m, reps) | Expand(v, big)
    Reshape<allowzero = 1>(m, shape) | Transpose<perm = [1, 0]>(m) | Unsqueeze(m, i1) | Flatten<axis = 1>(img) | ReduceMean<keepdims = 1>(m, i1) | ReduceMax(m, i1)
    ReduceProd(m, i0) | ReduceL2(m, i1) | ReduceLogSumExp<noop_with_empty_axes = 1>(m) | CumSum<exclusive = 1, reverse = 1>(m, zero) | Where(cond, m, v) | Clip(m, half, one) | Pow(m, half)
    Mod<fmod = 1>(m, v) | Max(m, v) | Mean(m, v) | Sum(m, v) | Einsum<equation = "ij,jk->ik">(m, w) | Resize<mode = "linear">(img, , , sizes) | Resize<mode = "cubic">(img, , scales)
    GridSample<mode = "linear", padding_mode = "border">(img, grid) | AffineGrid<align_corners = 1>(theta, gridsize) | DepthToSpace<blocksize = 1, mode = "CRD">(img)
    SpaceToDepth<blocksize = 2>(img) | Trilu<upper = 1>(m) | Elu<alpha = 2.0>(m) | PRelu(m, v) | Cast<to = 11>(m) | CastLike(m, v) | Erf(m) | Gelu<approximate = "tanh">(m) | Det(big_matrix)
    OneHot<axis = -1>(labels, depth, onoff) | EyeLike<k = 1>(m) | ReverseSequence<batch_axis = 0, time_axis = 1>(seq, lens) | Compress<axis = 0>(v, cond) | Col2Im(cols, image, block)
    RoiAlign<output_height = 2, output_width = 2>(img, roi, i0) | SoftmaxCrossEntropyLoss<reduction = "mean">(three, labels) | NegativeLogLikelihoodLoss(three, labels)
    CenterCropPad<axes = [2, 3]>(img, crop) | DFT<onesided = 0>(seq, , zero) | Dropout(m, half, flag) | Celu<alpha = 0.5>(m) | Shrink<lambd = 0.5>(m) | ThresholdedRelu(m) | Selu(m)
"""
_PAIRS = {
    "TopK": "a, b = TopK<axis = -1>(m, i1) r = Identity(a)",
    "Split": "a, b = Split<axis = 1>(m, split) r = Add(a, a)",
    "Split-equal": "a, b = Split<axis = 1, num_outputs = 2>(m) r = Mul(a, b)",
    "LSTM": "r, h, c = LSTM<hidden_size = 3>(seq, lw, lr)",
    "Unique": "r, a, b, c = Unique<sorted = 1, axis = 0>(v)",
    "Squeeze": "u = Unsqueeze(m, i0) r = Squeeze(u, i0)",
    "SequenceAt": "s = SplitToSequence<axis = 0>(m) r = SequenceAt(s, zero)",
    "Optional": "o = Optional(m) r = OptionalGetElement(o)",
    "MaxUnpool": "p, q = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(img) r = MaxUnpool<kernel_shape = [2, 2], strides = [2, 2]>(p, q)",
}
_MORE = {"Det": "big_matrix = Reshape(m, square)", "Col2Im": "cols = Reshape(img, columns)", "SoftmaxCrossEntropyLoss": "three = MatMul(m3, w)", "NegativeLogLikelihoodLoss": "three = MatMul(m3, w)"}  # fmt: skip


def operator_models() -> Iterator[tuple[str, bytes]]:
    """The models, by the operator."""

    def ones(count: int) -> str:
        return ", ".join(["1"] * count)

    constants = _CONSTANTS % (ones(36), ones(48), ones(36), ones(32))
    constants += ", int64[2] square = {2, 2}, int64[3] columns = {1, 8, 4}, float[3, 4] m3 = {" + ones(12) + "}"
    lines = {
        line.partition("(")[0].partition("<")[0].strip(): line.strip()
        for text in _LINES.splitlines()
        for line in text.split(" | ")
        if line.strip()
    }
    bodies = {name: f"{_MORE.get(name, '')} r = {line}" for name, line in lines.items()} | _PAIRS
    for name, body in bodies.items():
        model = parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 20]> g ({_INPUTS}) => (float y) <{constants}> {{ {body} f = Cast<to = 1>(r) y = ReduceSum<keepdims = 0>(f) }}'
        )
        used = {source for node in model.graph.node for source in node.input}
        for part in (model.graph.initializer, model.graph.input):
            for item in [item for item in part if item.name not in used]:
                part.remove(item)
        yield f"operator {name}", model.SerializeToString()
