"""Pools."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.gradients._builder import Builder, attr
from symbolics.gradients._registry import gradient
from symbolics.gradients._windows import Windows, windows

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
        indices.name = indices.name or op.session.name("indices")
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
