"""Pools."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from symbolics.gradients.registry import composite, gradient
from symbolics.gradients.windows import Windows, windows
from symbolics.graph.builder import Builder
from symbolics.graph.values import attr

__all__: list[str] = []


def _slide(op: Builder, node: ir.Node) -> Windows:
    return windows(op, node, node.inputs[0], node.outputs[0], list(attr(node, "kernel_shape")))


@gradient("MaxPool")
def max_pool(op, node, g, *_):
    """Each window's element goes to the place of its maximum."""
    if g is None:
        return [None]
    x = node.inputs[0]
    if attr(node, "storage_order", 0):  # its indices count columns first: ask again
        attributes = {k: v for k, v in node.attributes.items() if k != "storage_order"}
        indices = op.node("MaxPool", [x], outputs=2, **attributes)[1]
    else:
        if len(node.outputs) < 2:
            node.resize_outputs(2)
        indices = node.outputs[1]
        indices.name = indices.name or op.scope.name("indices")
    indices.type, indices.shape = ir.TensorType(ir.DataType.INT64), node.outputs[0].shape
    kernel = attr(node, "kernel_shape")
    strides, dilations = attr(node, "strides") or [1] * len(kernel), attr(node, "dilations") or [1] * len(kernel)
    apart = all(s > (k - 1) * d for s, k, d in zip(strides, kernel, dilations))
    return [op.scatter_numbers(g, indices, x, unique=apart)]


@gradient("GlobalMaxPool")
def global_max_pool(op, node, g):
    """The first of equal maxima, as torch's adaptive pools pick."""
    x = node.inputs[0]
    flat = op.Reshape(x, [0, 0, -1])
    first = op.ArgMax(flat, axis=2, keepdims=1)
    return [op.reshape_like(op.ScatterElements(op.zeros(op.Shape(flat), g.dtype), first, op.Reshape(g, [0, 0, 1]), axis=2), x)]


@gradient("GlobalAveragePool")
def global_average_pool(op, node, g):
    x = node.inputs[0]
    return [op.expand_like(g / op.count_over(x, range(2, op.rank(node, x)), g), x)]


@gradient("AveragePool")
def average_pool(op, node, g):
    slide = _slide(op, node)
    n = slide.rank
    include = bool(attr(node, "count_include_pad", 0))
    if attr(node, "auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER"):
        pads = [*slide.before, *[a if not isinstance(a, int) else max(a, 0) for a in slide.after]]
    else:
        pads = [0] * (2 * n) if attr(node, "auto_pad", "NOTSET") == "VALID" else attr(node, "pads") or [0] * (2 * n)
    return [slide.spread(g / slide.counts(include, list(pads), g))]


def _power(op: Builder, x: ir.Value, p: int) -> ir.Value:
    """The derivative of |x|^p / p."""
    return op.Sign(x) if p == 1 else x if p == 2 else op.Sign(x) * op.Pow(op.Abs(x), op.number(p - 1, x))


def _share(op: Builder, y: ir.Value, g: ir.Value, p: int) -> ir.Value:
    """g * y^(1-p); 0 where y is 0."""
    return g if p == 1 else g * op.Where(op.Equal(y, 0.0), op.number(0.0, y), op.Pow(y, op.number(1 - p, y)))


@gradient("LpPool")
def lp_pool(op, node, g):
    p = attr(node, "p", 2)
    return [_slide(op, node).spread(_share(op, node.outputs[0], g, p)) * _power(op, node.inputs[0], p)]


@gradient("GlobalLpPool")
def global_lp_pool(op, node, g):
    p = attr(node, "p", 2)
    return [_share(op, node.outputs[0], g, p) * _power(op, node.inputs[0], p)]


@gradient("MaxUnpool")
def max_unpool(op, node, g):
    """Each element comes back from where its index put it. Indices count in the size that the windows give, so cut g to it."""
    x, indices = node.inputs[:2]
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        kernel = attr(node, "kernel_shape")
        n = len(kernel)
        strides, pads = attr(node, "strides") or [1] * n, attr(node, "pads") or [0] * (2 * n)
        sizes = []
        for i, k in enumerate(kernel):
            d, rest = op.dim(x, i + 2), k - pads[i] - pads[i + n] - strides[i]
            sizes.append(d * strides[i] + rest if isinstance(d, int) else op.Add(op.Mul(d, op.i64([strides[i]])), op.i64([rest])))
        g = op.Slice(g, [0] * n, op.vector(sizes), list(range(2, n + 2)))
    return [op.reshape_like(op.Gather(op.Reshape(g, [-1]), op.flat(indices)), x), None, None][: len(node.inputs)]


@gradient("LRN")
def lrn(op, node, g):
    """y = x / s^beta with s = bias + alpha/size * (sum of x^2 over a window of channels).

    dx = g / s^beta - 2 alpha beta / size * x * (the transposed window sum of g * y / s). The window reaches
    (size-1)//2 channels back and size//2 on, its transpose the other way round.
    """
    x, y = node.inputs[0], node.outputs[0]
    size, alpha, beta, bias = attr(node, "size"), attr(node, "alpha", 1e-4), attr(node, "beta", 0.75), attr(node, "bias", 1.0)
    back, on = (size - 1) // 2, size - 1 - (size - 1) // 2

    def window_sum(v: ir.Value, before: int, after: int) -> ir.Value:
        planes = op.Reshape(op.Unsqueeze(v, [1]), [0, 0, 0, -1])
        sums = op.AveragePool(planes, kernel_shape=[size, 1], pads=[before, 0, after, 0], count_include_pad=1)
        return op.reshape_like(sums, x) * float(size)

    s = bias + (alpha / size) * window_sum(x * x, back, on)
    return [g * op.Pow(s, op.number(-beta, s)) - (2 * alpha * beta / size) * x * window_sum(g * y / s, on, back)]


@composite("MaxRoiPool")
def max_roi_pool(op, node):
    """The maximum of each bin of each region, over columns and then rows; Fast R-CNN, arXiv 1504.08083, section 2.1.

    A region is (image, x1, y1, x2, y2) in whole pixels, the last included; bins overlap by a pixel where they do not divide
    it, and an empty one gives 0.
    """
    x, regions = node.inputs
    scale, bins = attr(node, "spatial_scale", 1.0), attr(node, "pooled_shape")
    image = op.Cast(op.Gather(regions, op.i64(0), axis=1), to=ir.DataType.INT64)
    pooled = op.Unsqueeze(op.Gather(x, image, axis=0), [2])  # (regions, channels, 1, H, W)
    filled = None
    for axis, count in ((3, bins[1]), (2, bins[0])):
        low, high = (op.Gather(regions, op.i64([k]), axis=1) * scale for k in (4 - axis, 6 - axis))
        low, high = (op.Sign(v) * op.Floor(op.Abs(v) + 0.5) for v in (low, high))  # halves away from zero
        width = op.Max(high - low + 1.0, 1.0) / float(count)
        steps = op.constant(np.arange(count)[None], x.dtype)
        first, end = low + op.Floor(steps * width), low + op.Ceil((steps + 1.0) * width)  # (regions, bins)
        p = op.Cast(op.indices(x, axis), to=x.dtype)
        inside = op.And(op.GreaterOrEqual(p, op.Unsqueeze(first, [2])), op.Less(p, op.Unsqueeze(end, [2])))
        some = op.Cast(op.ReduceMax(op.Cast(inside, to=ir.DataType.INT64), [2], keepdims=0), to=ir.DataType.BOOL)
        # Columns: (regions, 1, bins, 1, W) of (regions, channels, 1, H, W); rows: (regions, 1, 1, bins, H) of what is left.
        mask = op.Unsqueeze(inside, [1, 3] if axis == 3 else [1, 2])
        pooled = op.ReduceMax(op.Where(mask, pooled, float("-inf")), [4], keepdims=0)
        if axis == 3:
            filled, pooled = op.Unsqueeze(some, [1]), op.Unsqueeze(pooled, [3])  # (regions, channels, columns, 1, H)
        else:
            filled = op.And(op.Unsqueeze(filled, [3]), op.Unsqueeze(some, [1, 2]))
    return [op.Transpose(op.Where(filled, pooled, 0.0), perm=[0, 1, 3, 2])]
