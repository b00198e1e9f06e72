"""One row an operator: its model as text, and torch's function of the same, which float64 makes the reference.

In a signature F is the float type, K the integer type of indices, and N, C are sizes; what is not F or K is what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

__all__ = ["ROWS", "Row"]


@dataclass(frozen=True)
class Row:
    """A model.

    Attributes:
        signature, body: As `tools.model_of` takes them.
        function: Torch's, of the inputs by their order; of float64.
        low, high: Between which numbers the floats are.
        most: Of each integer input, the number below which its elements are; a letter is a size.
        empty: The sizes that may be zero, in onnxruntime's forward as in torch.
        coarse: Whether it has no more than the precision of float32 in float64: attributes are float32, and so is the evaluator's Erf.
    """

    signature: str
    body: str
    function: Callable[..., torch.Tensor]
    low: float = -1.5
    high: float = 1.5
    most: tuple[int | str, ...] = ()
    empty: str = "N"
    coarse: bool = False


def _unary(name: str, function: Callable[..., Any], low: float = -1.5, high: float = 1.5, coarse: bool = False) -> tuple[str, Row]:
    return name, Row("F[N,C] x", f"y = {name}(x)", function, low, high, empty="NC", coarse=coarse)


def _binary(name: str, function: Callable[..., Any], low: float = -1.5, high: float = 1.5) -> tuple[str, Row]:
    return name, Row("F[N,C] x, F[C] b", f"y = {name}(x, b)", function, low, high, empty="NC")


def _reduction(name: str, function: Callable[..., Any], low: float = -1.5, empty: str = "NC") -> list[tuple[str, Row]]:
    axis, all_ = "a = Constant<value_ints = [1]>()", ""
    return [
        (f"{name} along an axis", Row("F[N,C] x", f"{axis} y = {name}<keepdims = 0>(x, a)", lambda x: function(x, 1), low, empty=empty)),
        (f"{name} of all", Row("F[N,C] x", f"{all_} y = {name}<keepdims = 0>(x)", lambda x: function(x.flatten(), 0), low, empty=empty.strip("NC"))),
    ]  # fmt: skip


def _scattered(x: torch.Tensor, i: torch.Tensor, u: torch.Tensor, reduce: str | None) -> torch.Tensor:
    if reduce is None:
        return x.scatter(0, i, u)
    return x.scatter_reduce(0, i, u, {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[reduce])


ROWS: dict[str, Row] = dict(
    [
        _unary("Abs", torch.abs),
        _unary("Neg", torch.neg),
        _unary("Exp", torch.exp),
        _unary("Sin", torch.sin),
        _unary("Cos", torch.cos),
        _unary("Tanh", torch.tanh),
        _unary("Sigmoid", torch.sigmoid),
        _unary("Softplus", F.softplus),
        _unary("Softsign", F.softsign),
        _unary("Erf", torch.erf, coarse=True),
        _unary("Relu", F.relu),
        _unary("LeakyRelu", lambda x: F.leaky_relu(x, 0.01), coarse=True),
        _unary("Elu", F.elu),
        _unary("Selu", F.selu, coarse=True),
        _unary("Celu", F.celu),
        _unary("Gelu", F.gelu, coarse=True),
        _unary("Mish", F.mish),
        _unary("HardSwish", F.hardswish, coarse=True),
        _unary("HardSigmoid", lambda x: (0.2 * x + 0.5).clamp(0, 1), coarse=True),
        _unary("Atan", torch.atan),
        _unary("Sinh", torch.sinh),
        _unary("Cosh", torch.cosh),
        _unary("Asinh", torch.asinh),
        _unary("Asin", torch.asin, -0.8, 0.8),
        _unary("Acos", torch.acos, -0.8, 0.8),
        _unary("Atanh", torch.atanh, -0.8, 0.8),
        _unary("Tan", torch.tan, -0.8, 0.8),
        _unary("Acosh", torch.acosh, 1.3, 3),
        _unary("Log", torch.log, 0.5, 3),
        _unary("Sqrt", torch.sqrt, 0.5, 3),
        _unary("Reciprocal", torch.reciprocal, 0.5, 3),
        _unary("Softmax", lambda x: x.softmax(-1)),
        _unary("LogSoftmax", lambda x: x.log_softmax(-1)),
        _unary("Identity", torch.clone),
        _binary("Add", torch.add),
        _binary("Sub", torch.sub),
        _binary("Mul", torch.mul),
        _binary("Div", torch.div, 0.5, 2),
        _binary("Pow", torch.pow, 0.5, 2),
        _binary("Max", torch.maximum),
        _binary("Min", torch.minimum),
        _binary("Sum", torch.add),
        _binary("Mean", lambda x, b: (x + b) / 2),
        _binary("PRelu", lambda x, b: torch.where(x < 0, x * b, x)),
        *_reduction("ReduceSum", lambda x, a: x.sum(a)),
        *_reduction("ReduceMean", lambda x, a: x.mean(a), empty="N"),
        *_reduction("ReduceMax", lambda x, a: x.amax(a), empty="N"),
        *_reduction("ReduceMin", lambda x, a: x.amin(a), empty="N"),
        *_reduction("ReduceProd", lambda x, a: x.prod(a)),
        *_reduction("ReduceL1", lambda x, a: x.abs().sum(a)),
        *_reduction("ReduceL2", lambda x, a: x.norm(dim=a)),
        *_reduction("ReduceSumSquare", lambda x, a: x.square().sum(a)),
        *_reduction("ReduceLogSum", lambda x, a: x.sum(a).log(), 0.5, empty="N"),
        *_reduction("ReduceLogSumExp", lambda x, a: x.logsumexp(a), empty="N"),
        ("Where", Row("F[N,C] x, F[C] b", "c = Greater(x, b) y = Where(c, x, b)", lambda x, b: torch.where(x > b, x, b), empty="NC")),
        ("Clip", Row("F[N,C] x, F l, F h", "y = Clip(x, l, h)", lambda x, low, high: torch.minimum(torch.maximum(x, low), high), empty="NC")),
        ("MatMul", Row("F[N,C] x, F[C,3] w", "y = MatMul(x, w)", torch.matmul, empty="NC")),
        ("MatMul of stacks", Row("F[2,N,C] x, F[2,C,3] w", "y = MatMul(x, w)", torch.matmul, empty="NC")),
        ("MatMul with a vector", Row("F[N,C] x, F[C] w", "y = MatMul(x, w)", torch.matmul, empty="NC")),
        ("Gemm", Row("F[N,C] x, F[3,C] w, F[3] b", "y = Gemm<transB = 1>(x, w, b)", F.linear, empty="NC")),
        ("Einsum", Row("F[N,C] x, F[N,3] w", 'y = Einsum<equation = "nc,nd->cd">(x, w)', lambda x, w: x.T @ w, empty="NC")),
        ("Einsum over two axes", Row("F[N,3,C,2] x, F[3,4] w", 'y = Einsum<equation = "nchw,cd->ndhw">(x, w)', lambda x, w: torch.einsum("nchw,cd->ndhw", x, w), empty="NC")),
        ("Einsum in another order", Row("F[C,N] x, F[C,3] w", 'y = Einsum<equation = "cn,cd->dn">(x, w)', lambda x, w: torch.einsum("cn,cd->dn", x, w), empty="NC")),
        ("LayerNormalization", Row("F[N,C,4] x, F[4] s, F[4] b", "y = LayerNormalization(x, s, b)", lambda x, s, b: F.layer_norm(x, [4], s, b), empty="NC", coarse=True)),
        ("LayerNormalization of the channels", Row("F[N,C] x, F[C] s, F[C] b", "y = LayerNormalization(x, s, b)", lambda x, s, b: F.layer_norm(x, [x.shape[1]], s, b), coarse=True)),
        ("RMSNormalization", Row("F[N,C,4] x, F[4] s", "y = RMSNormalization(x, s)", lambda x, s: F.rms_norm(x, [4], s, 1e-5), empty="NC", coarse=True)),
        ("InstanceNormalization", Row("F[N,C,5] x, F[C] s, F[C] b", "y = InstanceNormalization(x, s, b)", lambda x, s, b: F.instance_norm(x, weight=s, bias=b), empty="", coarse=True)),
        ("GroupNormalization", Row("F[N,C,5] x, F[C] s, F[C] b", "y = GroupNormalization<num_groups = 1>(x, s, b)", lambda x, s, b: F.group_norm(x, 1, s, b), coarse=True, empty="")),
        ("BatchNormalization", Row("F[N,C,2] x, F[C] s, F[C] b, F[C] m, F[C] v", "w = Mul(v, v) y = BatchNormalization(x, s, b, m, w)", lambda x, s, b, m, v: (x - m[:, None]) / (v * v + 1e-5)[:, None].sqrt() * s[:, None] + b[:, None], 0.5, coarse=True)),
        ("LpNormalization", Row("F[N,C] x", "y = LpNormalization<p = 2>(x)", lambda x: x / x.norm(dim=1, keepdim=True), 0.5)),
        ("CumSum", Row("F[N,C] x, K i", "y = CumSum(x, i)", lambda x, i: x.cumsum(0), most=(1,), empty="NC")),
        ("Gather", Row("F[4,N] x, K[C] i", "y = Gather(x, i)", lambda x, i: x[i], most=(4,), empty="NC")),
        ("Gather along the last axis", Row("F[N,4] x, K[C,2] i", "y = Gather<axis = 1>(x, i)", lambda x, i: x[:, i], most=(4,), empty="NC")),
        ("Gather of one", Row("F[4,N] x, K i", "y = Gather(x, i)", lambda x, i: x[i], most=(4,))),
        ("GatherElements", Row("F[4,C] x, K[N,C] i", "y = GatherElements(x, i)", lambda x, i: x.gather(0, i), most=(4,), empty="NC")),
        ("GatherND", Row("F[4,C] x, int64[N,1] i", "y = GatherND(x, i)", lambda x, i: x[i[:, 0]], most=(4,), empty="NC")),
        *[
            (f"ScatterElements {reduce or 'none'}", Row("F[5,C] x, K[N,C] i, F[N,C] u", f"y = ScatterElements{f'<reduction = {chr(34)}{reduce}{chr(34)}>' if reduce else ''}(x, i, u)", lambda x, i, u, reduce=reduce: _scattered(x, i, u, reduce), most=("apart",), empty="NC"))
            for reduce in (None, "add", "mul", "max", "min")
        ],
        ("ScatterND", Row("F[5,C] x, int64[N,1] i, F[N,C] u", "y = ScatterND(x, i, u)", lambda x, i, u: x.index_put((i[:, 0],), u), most=("apart",), empty="NC")),
        ("ScatterND add", Row("F[5,C] x, int64[N,1] i, F[N,C] u", 'y = ScatterND<reduction = "add">(x, i, u)', lambda x, i, u: x.index_add(0, i[:, 0], u), most=(5,), empty="NC")),
        ("OneHot", Row("F[2] v, K[N,C] i", "d = Constant<value = int64 {4}>() y = OneHot(i, d, v)", lambda v, i: v[F.one_hot(i, 4)], most=(4,), empty="NC")),
        ("TopK", Row("F[N,C] x", "k = Constant<value_ints = [1]>() y, j = TopK(x, k)", lambda x: x.topk(1)[0])),
        ("Slice", Row("F[4,C] x, K[1] i", "e = Constant<value_ints = [4]>() k = CastLike(e, i) y = Slice(x, i, k)", lambda x, i: x[int(i):], most=(4,), empty="C")),
        ("Slice backwards", Row("F[N,C] x, K[1] i", "m = Constant<value_ints = [-1]>() e = Constant<value_ints = [-99]>() j = CastLike(m, i) k = CastLike(e, i) y = Slice(x, j, k, i, j)", lambda x, i: x.flip(0), most=(1,), empty="NC")),
        ("Pad", Row("F[N,C] x, K[1] i", "p = Constant<value_ints = [1, 2]>() y = Pad(x, p, , i)", lambda x, i: F.pad(x, (0, 0, 1, 2)), most=(1,), empty="NC")),
        ("Pad with the edge", Row("F[N,C,4] x, K[1] i", 'p = Constant<value_ints = [0, 0, 1, 0, 0, 2]>() y = Pad<mode = "edge">(x, p)', lambda x, i: F.pad(x, (1, 2), mode="replicate"), most=(1,))),
        ("Split", Row("F[N,4] x", "a, b = Split<axis = 1, num_outputs = 2>(x) y = Mul(a, b)", lambda x: x[:, :2] * x[:, 2:])),
        ("Concat", Row("F[N,C] x, F[N,2] b", "y = Concat<axis = 1>(x, b)", lambda x, b: torch.cat([x, b], 1), empty="NC")),
        ("Transpose", Row("F[N,C] x", "t = Transpose<perm = [1, 0]>(x) y = Mul(t, t)", lambda x: (x * x).T, empty="NC")),
        ("Reshape", Row("F[N,C] x", "s = Constant<value_ints = [-1]>() t = Reshape(x, s) y = Mul(t, t)", lambda x: (x * x).flatten(), empty="NC")),
        ("Expand", Row("F[1,C] x", "s = Constant<value_ints = [3, 1]>() y = Expand(x, s)", lambda x: x.expand(3, -1), empty="C")),
        ("Expand to nothing", Row("F[1,C] x", "s = Constant<value_ints = [0, 1]>() y = Expand(x, s)", lambda x: x.expand(0, -1), empty="C")),
        ("Tile", Row("F[N,C] x", "r = Constant<value_ints = [2, 3]>() y = Tile(x, r)", lambda x: x.repeat(2, 3), empty="NC")),
        ("Unsqueeze", Row("F[N,C] x", "a = Constant<value_ints = [1]>() t = Unsqueeze(x, a) y = Mul(t, t)", lambda x: (x * x)[:, None], empty="NC")),
        ("Flatten", Row("F[N,C,2] x", "t = Flatten(x) y = Mul(t, t)", lambda x: (x * x).flatten(1))),
        ("Trilu", Row("F[N,C] x", "y = Trilu<upper = 0>(x)", torch.tril, empty="NC")),
        ("Compress", Row("F[N,C] x", "c = Constant<value = bool[1] {1}>() y = Compress<axis = 1>(x, c)", lambda x: x[:, :1])),
        ("ReverseSequence", Row("F[N,2] x, int64[2] i", "y = ReverseSequence<time_axis = 0, batch_axis = 1>(x, i)", lambda x, i: x, most=(1,), empty="")),
        ("NegativeLogLikelihoodLoss", Row("F[N,C] x, K[N] i", 'y = NegativeLogLikelihoodLoss<reduction = "sum">(x, i)', lambda x, i: F.nll_loss(x, i, reduction="sum"), most=("C",))),
        ("NegativeLogLikelihoodLoss, weighted", Row("F[N,C] x, K[N] i, F[C] w", 'y = NegativeLogLikelihoodLoss<reduction = "mean">(x, i, w)', lambda x, i, w: F.nll_loss(x, i, w.detach()), 0.5, most=("C",), empty="")),
        ("SoftmaxCrossEntropyLoss", Row("F[N,C] x, K[N] i", 'y = SoftmaxCrossEntropyLoss<reduction = "none">(x, i)', lambda x, i: F.cross_entropy(x, i, reduction="none"), most=("C",), empty="")),
        ("Conv", Row("F[N,C,5,5] x, F[2,C,3,3] w, F[2] b", "y = Conv<pads = [1, 1, 1, 1]>(x, w, b)", lambda x, w, b: F.conv2d(x, w, b, padding=1))),
        ("Conv, strided", Row("F[N,C,5,5] x, F[2,C,2,2] w", "y = Conv<strides = [2, 2]>(x, w)", lambda x, w: F.conv2d(x, w, stride=2))),
        ("Conv in one dimension", Row("F[N,C,5] x, F[2,C,3] w", "y = Conv<dilations = [2]>(x, w)", lambda x, w: F.conv1d(x, w, dilation=2))),
        ("ConvTranspose", Row("F[N,C,3,3] x, F[C,2,2,2] w", "y = ConvTranspose<strides = [2, 2]>(x, w)", lambda x, w: F.conv_transpose2d(x, w, stride=2))),
        ("AveragePool", Row("F[N,C,4,4] x", "y = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(x)", lambda x: F.avg_pool2d(x, 2))),
        ("MaxPool", Row("F[N,C,4,4] x", "y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x)", lambda x: F.max_pool2d(x, 2))),
        ("GlobalAveragePool", Row("F[N,C,3,3] x", "y = GlobalAveragePool(x)", lambda x: x.mean((2, 3), keepdim=True))),
        ("GlobalMaxPool", Row("F[N,C,3,3] x", "y = GlobalMaxPool(x)", lambda x: x.amax((2, 3), keepdim=True))),
        ("DepthToSpace", Row("F[N,4,C,2] x", 't = DepthToSpace<blocksize = 2, mode = "CRD">(x) y = Mul(t, t)', lambda x: F.pixel_shuffle(x * x, 2), empty="")),
        ("Resize", Row("F[N,C,2,2] x", 's = Constant<value_floats = [1.0, 1.0, 2.0, 2.0]>() y = Resize<mode = "nearest", nearest_mode = "floor", coordinate_transformation_mode = "asymmetric">(x, , s)', lambda x: F.interpolate(x, scale_factor=2))),
        ("Resize, linear", Row("F[N,C,2,2] x", 's = Constant<value_floats = [1.0, 1.0, 2.0, 2.0]>() y = Resize<mode = "linear">(x, , s)', lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"))),
        ("SpaceToDepth", Row("F[N,C,2,4] x", "y = SpaceToDepth<blocksize = 2>(x)", lambda x: x.unflatten(3, (2, 2)).unflatten(2, (1, 2)).permute(0, 3, 5, 1, 2, 4).flatten(1, 3), empty="")),
        ("Conv, grouped", Row("F[N,4,5,5] x, F[4,2,3,3] w", "y = Conv<group = 2>(x, w)", lambda x, w: F.conv2d(x, w, groups=2))),
        ("Conv, depthwise", Row("F[N,4,5,5] x, F[4,1,3,3] w", "y = Conv<group = 4, strides = [2, 2]>(x, w)", lambda x, w: F.conv2d(x, w, groups=4, stride=2))),
        ("LRN", Row("F[N,C,2,2] x", "y = LRN<size = 3, alpha = 0.5>(x)", lambda x: F.local_response_norm(x, 3, alpha=0.5), coarse=True)),
        ("LpPool", Row("F[N,C,4,4] x", "y = LpPool<kernel_shape = [2, 2], strides = [2, 2]>(x)", lambda x: F.lp_pool2d(x, 2.0, 2))),
        ("GridSample", Row("F[N,C,3,3] x, F[N,2,2,2] p", "y = GridSample<align_corners = 1>(x, p)", lambda x, p: F.grid_sample(x, p, align_corners=True), -0.83, 0.83)),
    ]
)  # fmt: skip
