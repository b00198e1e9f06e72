"""Pools."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from symbolics.gradients.registry import Ints, composite, gradient
from symbolics.gradients.residuals import residual
from symbolics.gradients.windows import Amount, Dim, windows
from symbolics.graph.builder import Builder
from symbolics.graph.named import call
from symbolics.graph.values import check_unrolled, dtype_of

__all__: list[str] = []


@gradient("MaxPool")
def max_pool(
    op: Builder, g: Value, x: Value, *, y: Value, node: ir.Node, storage_order: int,
    kernel_shape: list[int], strides: Ints, dilations: Ints,
) -> Value:  # fmt: skip
    """Each window's element goes to the place of its maximum."""
    if storage_order:  # its indices count columns first: ask again
        _, indices = op.MaxPool(x, outputs=2, **{k: v for k, v in node.attributes.items() if k != "storage_order"})
        indices.type, indices.shape = ir.TensorType(ir.DataType.INT64), y.shape
    else:
        indices = residual(op, node, 1, "indices", ir.DataType.INT64, y.shape)
    n = len(kernel_shape)
    apart = all(s > (k - 1) * d for s, k, d in zip(strides or [1] * n, kernel_shape, dilations or [1] * n))

    def write(inside: Builder, given: Sequence[Value]) -> list[Value]:
        g, indices, shape = given
        zeros = inside.zeros(inside.ReduceProd(shape, keepdims=1), dtype_of(g))
        put = inside.ScatterElements(zeros, inside.flat(indices), inside.flat(g), axis=0, reduction=None if apart else "add")
        back = inside.Reshape(put, shape, allowzero=1)
        back.shape = x.shape
        return [back]

    return call(op, "MaxPoolGrad", [g, indices, op.Shape(x)], write, results=[x], adds=[int(not apart)])[0]


@gradient("GlobalMaxPool")
def global_max_pool(op: Builder, g: Value, x: Value) -> Value:
    """The first of equal maxima, as torch's adaptive pools pick."""
    flat = op.merged(x, 2)
    first = op.ArgMax(flat, axis=2, keepdims=1)
    return op.reshape_like(op.ScatterElements(op.zeros(op.Shape(flat), dtype_of(g)), first, op.merged(g, 2), axis=2), x)


@gradient("GlobalAveragePool")
def global_average_pool(op: Builder, g: Value, x: Value, *, node: ir.Node) -> Value:
    return op.expand_like(op.shared(g, op.count_over(x, range(2, op.rank(node, x)), g)), x)


@gradient("AveragePool")
def average_pool(
    op: Builder, g: Value, x: Value, *, y: Value, node: ir.Node,
    kernel_shape: list[int], pads: Ints, auto_pad: str, count_include_pad: int,
) -> Value:  # fmt: skip
    slide = windows(op, node, x, y, kernel_shape)
    padding: Sequence[Dim] = [0] * (2 * slide.rank) if auto_pad == "VALID" or not pads else pads
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        padding = [*slide.before, *[a if not isinstance(a, int) else max(a, 0) for a in slide.after]]
    counts = slide.counts(bool(count_include_pad), padding, g)
    return slide.spread(op.shared(g, counts) if isinstance(counts, float) else g / counts)


def _power(op: Builder, x: Value, p: int) -> Value:
    """The derivative of |x|^p / p."""
    return op.Sign(x) if p == 1 else x if p == 2 else op.Sign(x) * op.Pow(op.Abs(x), op.number(p - 1, x))


def _share(op: Builder, y: Value, g: Value, p: int) -> Value:
    """g * y^(1-p); 0 where y is 0."""
    return g if p == 1 else g * op.Where(op.Equal(y, 0.0), op.number(0.0, y), op.Pow(y, op.number(1 - p, y)))


@gradient("LpPool")
def lp_pool(op: Builder, g: Value, x: Value, *, y: Value, node: ir.Node, p: int, kernel_shape: list[int]) -> Value:
    return windows(op, node, x, y, kernel_shape).spread(_share(op, y, g, p)) * _power(op, x, p)


@gradient("GlobalLpPool")
def global_lp_pool(op: Builder, g: Value, x: Value, *, y: Value, p: int) -> Value:
    return _share(op, y, g, p) * _power(op, x, p)


@gradient("MaxUnpool")
def max_unpool(
    op: Builder, g: Value, x: Value, indices: Value, output_shape: Value | None, *,
    kernel_shape: list[int], strides: Ints, pads: Ints,
) -> Value:  # fmt: skip
    """Each element comes back from where its index put it. Indices count in the size that the windows give, so cut g to it."""
    if output_shape is not None:
        n = len(kernel_shape)
        strides, pads = strides or [1] * n, pads or [0] * (2 * n)
        rest = [k - pads[i] - pads[i + n] - strides[i] for i, k in enumerate(kernel_shape)]
        sizes = [(Amount.of(op, op.dim(x, i + 2)) * strides[i] + rest[i]).dim for i in range(n)]
        g = op.Slice(g, [0] * n, op.vector(sizes), list(range(2, n + 2)))
    return op.reshape_like(op.Gather(op.Reshape(g, [-1]), op.flat(indices)), x)


@gradient("LRN")
def lrn(op: Builder, g: Value, x: Value, *, y: Value, size: int, alpha: float, beta: float, bias: float) -> Value:
    """y = x / s^beta with s = bias + alpha/size * (sum of x^2 over a window of channels).

    dx = g / s^beta - 2 alpha beta / size * x * (the transposed window sum of g * y / s). The window reaches
    (size-1)//2 channels back and size//2 on, its transpose the other way round.
    """
    back, on = (size - 1) // 2, size - 1 - (size - 1) // 2

    def window_sum(v: Value, before: int, after: int) -> Value:
        images = op.Unsqueeze(v, [1])
        images.shape = None if x.shape is None else ir.Shape([x.shape[0], 1, *x.shape[1:]])
        planes = op.merged(images, 3)
        sums = op.AveragePool(planes, kernel_shape=[size, 1], pads=[before, 0, after, 0], count_include_pad=1)
        return op.reshape_like(sums, x) * float(size)

    s = bias + (alpha / size) * window_sum(x * x, back, on)
    return g * op.Pow(s, op.number(-beta, s)) - (2 * alpha * beta / size) * x * window_sum(g * y / s, on, back)


@composite("MaxRoiPool")
def max_roi_pool(op: Builder, x: Value, regions: Value, *, node: ir.Node, spatial_scale: float, pooled_shape: list[int]) -> Value:
    """The maximum of each bin of each region, over columns and then rows; Fast R-CNN, arXiv 1504.08083, section 2.1.

    A region is (image, x1, y1, x2, y2) in whole pixels, the last included; bins overlap by a pixel where they do not divide
    it, and an empty one gives 0.
    """
    check_unrolled(node, max(pooled_shape))
    image = op.Cast(op.Gather(regions, op.i64(0), axis=1), to=ir.DataType.INT64)
    pooled = op.Unsqueeze(op.Gather(x, image, axis=0), [2])  # (regions, channels, 1, H, W)
    filled = None
    for axis, count in ((3, pooled_shape[1]), (2, pooled_shape[0])):
        low, high = (op.Gather(regions, op.i64([k]), axis=1) * spatial_scale for k in (4 - axis, 6 - axis))
        low, high = (op.Sign(v) * op.Floor(op.Abs(v) + 0.5) for v in (low, high))  # halves away from zero
        width = op.Max(high - low + 1.0, 1.0) / float(count)
        steps = op.constant(np.arange(count)[None], dtype_of(x))
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
    return op.Transpose(op.Where(filled, pooled, 0.0), perm=[0, 1, 3, 2])
