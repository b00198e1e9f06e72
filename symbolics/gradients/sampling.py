"""Operators that read an image between its pixels: GridSample, RoiAlign, DeformConv, said in primitives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from symbolics.gradients.registry import Ints, composite, gradient
from symbolics.gradients.windows import Dim
from symbolics.graph.builder import Builder
from symbolics.graph.values import check_unrolled, dtype_of, static_shape, unsupported

__all__: list[str] = []

Tap = tuple[Value, Value]  # position along an axis (a whole number, as float), weight


def _linear(op: Builder, p: Value) -> list[Tap]:
    low = op.Floor(p)
    w = p - low
    return [(low, 1.0 - w), (low + 1.0, w)]


def _nearest(op: Builder, p: Value) -> list[Tap]:
    return [(op.Round(p), op.number(1.0, p))]


def _cubic(op: Builder, p: Value) -> list[Tap]:
    """Keys' kernel with a = -0.75, as in torch: near for the two middle taps, far for the others."""
    a, low = -0.75, op.Floor(p)
    t = p - low

    def near(s: Value) -> Value:
        return ((a + 2) * s - (a + 3)) * s * s + 1.0

    def far(s: Value) -> Value:
        return ((a * s - 5 * a) * s + 8 * a) * s - 4 * a

    return [(low - 1.0, far(t + 1.0)), (low, near(t)), (low + 1.0, near(1.0 - t)), (low + 2.0, far(2.0 - t))]


_MODES = {"linear": _linear, "bilinear": _linear, "nearest": _nearest, "cubic": _cubic, "bicubic": _cubic}


def _sample(op: Builder, rows: Value, base: Value, sizes: Sequence[Value], taps: Sequence[list[Tap]], masked: bool) -> list[Value]:
    """The weighted pixels of each combination of taps: their sum is the sample.

    ``rows`` is (images * pixels, channels); ``base`` the row where the image of a sample starts; ``sizes`` are floats. Where
    ``masked``, taps outside the image count as 0; otherwise they are inside.
    """
    out = []
    for combination in itertools.product(*taps):
        row, weight, inside = None, None, None
        for (position, w), size in zip(combination, sizes):
            last = size - 1.0
            if masked:
                here = op.And(op.GreaterOrEqual(position, 0.0), op.LessOrEqual(position, last))
                inside = here if inside is None else op.And(inside, here)
                position = op.Min(op.Max(position, 0.0), last)
            row = position if row is None else row * size + position
            weight = w if weight is None else weight * w
        if inside is not None:
            weight = weight * op.mask(inside, rows)
        pixels = op.Gather(rows, op.Add(op.Cast(row, to=ir.DataType.INT64), base), axis=0)
        out.append(pixels * op.Unsqueeze(weight, [-1]))
    return out


def _total(op: Builder, values: Sequence[Value]) -> Value:
    return values[0] if len(values) == 1 else op.Sum(*values)


def _size(op: Builder, x: Value, axis: int) -> Value:
    """A dim as a scalar of the type of x."""
    d = op.dim(x, axis)
    return op.number(d, x) if isinstance(d, int) else op.Squeeze(op.Cast(d, to=x.dtype), [0])


def _rows(op: Builder, x: Value, rank: int) -> Value:
    """(N, C, ...) to (N * pixels, C)."""
    return op.Reshape(op.Transpose(x, perm=[0, *range(2, rank), 1]), [-1, op.dim(x, 1)])


def _starts(op: Builder, x: Value, rank: int) -> Value:
    """Where each of the N images starts in `_rows`: (N)."""
    pixels = op.ReduceProd(op.vector([op.dim(x, i) for i in range(2, rank)]), keepdims=0)
    return op.Mul(op.indices(x, 0), pixels)


def _reflect(op: Builder, p: Value, low: Value, span: Value) -> Value:
    """Fold p into [low, low + span]."""
    q = op.Abs(p - low)
    flips = op.Floor(q / span)
    rest = q - flips * span
    odd = op.Greater(flips - 2.0 * op.Floor(flips * 0.5), 0.5)
    return low + op.Where(odd, span - rest, rest)


@composite("GridSample")
def grid_sample(op: Builder, x: Value, grid: Value, *, node: ir.Node, mode: str, padding_mode: str, align_corners: int) -> Value:
    """As torch.nn.functional.grid_sample: the padding acts on the point, for cubic on each tap."""
    rank = op.rank(node, x)
    n = rank - 2
    sizes = [_size(op, x, i + 2) for i in range(n)]
    is_padded = padding_mode == "zeros"

    def place(p: Value, size: Value) -> Value:
        last = size - 1.0
        if padding_mode == "reflection":
            p = _reflect(op, p, op.number(0.0, p), last) if align_corners else _reflect(op, p, op.number(-0.5, p), size)
        return p if is_padded else op.Min(op.Max(p, 0.0), last)

    taps = []
    for i, size in enumerate(sizes):
        p = op.Gather(grid, op.i64(n - 1 - i), axis=rank - 1)  # the last coordinate is the first axis
        p = (p + 1.0) * ((size - 1.0) * 0.5) if align_corners else ((p + 1.0) * size - 1.0) * 0.5
        if "cubic" in mode:
            taps.append([(place(q, size), w) for q, w in _cubic(op, p)] if not is_padded else _cubic(op, p))
        else:
            found = _MODES[mode](op, place(p, size))
            # at the border the upper tap has weight 0: let it stay inside
            taps.append(found if is_padded else [(op.Min(q, size - 1.0), w) for q, w in found])
    base = op.Reshape(_starts(op, x, rank), [-1, *[1] * n])
    total = _total(op, _sample(op, _rows(op, x, rank), base, sizes, taps, masked=is_padded))
    return op.Transpose(total, perm=[0, rank - 1, *range(1, rank - 1)])


@composite("AffineGrid")
def affine_grid(op: Builder, theta: Value, size: Value, *, y: Value, node: ir.Node, align_corners: int) -> Value:
    """theta times the homogeneous coordinates of the pixels, the last axis first."""
    shape = op.ints(size)
    n = len(shape) - 2 if shape else None if y.shape is None else len(y.shape) - 2
    if n is None and theta.shape is not None:
        n = next((d - (i == 2) for i, d in enumerate(theta.shape) if i and type(d) is int), None)
    if n is None:
        raise unsupported(node, "the number of spatial axes is not known")
    columns = []
    for i in reversed(range(n)):
        count = op.Gather(size, op.i64(i + 2), axis=0)
        steps = op.Cast(op.Range(op.i64(0), count, op.i64(1)), to=theta.dtype)
        d = op.Cast(count, to=theta.dtype)
        line = steps * 2.0 / op.Max(d - 1.0, 1.0) - 1.0 if align_corners else (2.0 * steps + 1.0) / d - 1.0
        line = op.Reshape(line, [-1 if j == i else 1 for j in range(n)])
        columns.append(op.Unsqueeze(op.Expand(line, op.Slice(size, [2], [n + 2])), [-1]))
    columns.append(op.Expand(op.number(1.0, theta), op.Concat(op.Slice(size, [2], [n + 2]), [1], axis=0)))
    points = op.Reshape(op.Concat(*columns, axis=n), [-1, n + 1])
    grid = op.MatMul(points, op.Transpose(theta, perm=[0, 2, 1]))
    return op.Reshape(grid, op.Concat(op.Slice(size, [0], [1]), op.Slice(size, [2], [n + 2]), [n], axis=0))


@composite("RoiAlign")
def roi_align(
    op: Builder, x: Value, rois: Value, batch: Value, *, node: ir.Node, mode: str, coordinate_transformation_mode: str,
    output_height: int, output_width: int, sampling_ratio: int, spatial_scale: float,
) -> Value:  # fmt: skip
    """sampling_ratio^2 bilinear samples per bin, their mean or maximum.

    Without a ratio each region has ceil(span / bins) samples per bin: as many as the largest needs are laid out, and each
    region counts its own.
    """
    ratio = sampling_ratio
    if ratio < 1 and mode != "avg":
        raise unsupported(node, "with sampling_ratio 0 and mode max the number of samples to compare depends on the regions")
    half = coordinate_transformation_mode == "half_pixel"
    bins = [output_height, output_width]
    check_unrolled(node, max(bins) * max(ratio, 1))
    sizes = [_size(op, x, 2), _size(op, x, 3)]
    taps, valids, own = [], [], []
    laid_out: list[Dim] = []
    for i, (count, size) in enumerate(zip(bins, sizes)):
        low, high = (op.Gather(rois, op.i64([k]), axis=1) * spatial_scale - (0.5 if half else 0.0) for k in (1 - i, 3 - i))
        span = high - low if half else op.Max(high - low, 1.0)
        if ratio > 0:
            steps = [(b + (s + 0.5) / ratio) / count for b in range(count) for s in range(ratio)]
            p = low + span * op.constant([steps], dtype_of(x))  # (regions, bins * ratio)
            ok = op.And(op.GreaterOrEqual(p, -1.0), op.LessOrEqual(p, size))
            laid_out.append(ratio)
        else:
            n = op.Unsqueeze(op.Max(op.Ceil(span / float(count)), 0.0), [2])
            most = op.Cast(op.ReduceMax(n, keepdims=0), to=ir.DataType.INT64)
            s = op.Cast(op.Range(op.i64(0), most, op.i64(1)), to=x.dtype)
            b = op.constant(np.arange(count)[:, None], dtype_of(x))
            p = op.Unsqueeze(low, [2]) + op.Unsqueeze(span, [2]) * ((b + (s + 0.5) / op.Max(n, 1.0)) / float(count))
            ok = op.And(op.And(op.GreaterOrEqual(p, -1.0), op.LessOrEqual(p, size)), op.Less(s, n))  # (regions, bins, most)
            p, ok = op.Reshape(p, [0, -1]), op.Reshape(ok, [0, -1])
            own.append(n)
            laid_out.append(op.Reshape(most, [1]))
        p = op.Min(op.Max(p, 0.0), size - 1.0)
        shape = [0, -1, 1] if i == 0 else [0, 1, -1]  # rows vary along axis 1, columns along axis 2
        p, ok = op.Reshape(p, shape), op.Reshape(ok, shape)
        valids.append(ok)
        taps.append([(op.Min(q, size - 1.0), w) for q, w in _linear(op, p)])
    base = op.Reshape(op.Gather(_starts(op, x, 4), batch, axis=0), [-1, 1, 1])
    parts = _sample(op, _rows(op, x, 4), base, sizes, taps, masked=False)
    gate = op.Unsqueeze(op.mask(op.And(*valids), x), [-1])
    split = op.vector([0, bins[0], laid_out[0], bins[1], laid_out[1], op.dim(x, 1)])
    if own and mode == "avg":
        total = op.ReduceSum(op.Reshape(_total(op, parts) * gate, split), [2, 4], keepdims=0)
        pooled = total / op.Max(op.Unsqueeze(own[0] * own[1], [3]), 1.0)
    elif mode == "avg":
        pooled = op.ReduceMean(op.Reshape(_total(op, parts) * gate, split), [2, 4], keepdims=0)
    else:  # the maximum of the weighted taps, as onnxruntime and the standard's reference take it
        pooled = op.ReduceMax(op.Reshape(op.Max(*parts) * gate, split), [2, 4], keepdims=0)
    return op.Transpose(pooled, perm=[0, 3, 1, 2])


@composite("DeformConv")
def deform_conv(
    op: Builder, x: Value, w: Value, offset: Value, b: Value | None, mask: Value | None, *, node: ir.Node, group: int, offset_group: int,
    kernel_shape: Ints, strides: Ints, dilations: Ints, pads: Ints,
) -> Value:  # fmt: skip
    """Bilinear samples where kernel places and offsets point, times the mask, then one product with the weight."""
    kernel = kernel_shape or (static_shape(w) or ())[2:]
    if op.rank(node, x) != 4 or not kernel:
        raise unsupported(node, "it needs two spatial axes and a kernel whose shape is known")
    strides, dilations, pads = strides or [1, 1], dilations or [1, 1], pads or [0] * 4
    places = kernel[0] * kernel[1]
    check_unrolled(node, places)
    out = [op.dim(offset, 2), op.dim(offset, 3)]
    channels = op.dim(x, 1)
    each = channels // offset_group if isinstance(channels, int) else op.Div(channels, op.i64([offset_group]))
    images = op.Reshape(x, [-1, each, op.dim(x, 2), op.dim(x, 3)])  # an image of its own for each offset group
    images.type, images.shape = x.type, ir.Shape([None, each if isinstance(each, int) else None, *(x.shape or ())[2:]])
    offsets = op.Reshape(offset, [-1, places, 2, *out])
    sizes = [_size(op, x, 2), _size(op, x, 3)]
    taps = []
    for i in range(2):
        steps = op.Range(op.i64(0), op.Squeeze(op.vector([out[i]]), [0]), op.i64(1))
        origin = op.Reshape(
            op.Cast(op.Mul(steps, op.i64(strides[i])), to=x.dtype) - float(pads[i]), [1, 1, -1, 1] if i == 0 else [1, 1, 1, -1]
        )
        index = [divmod(k, kernel[1])[i] * dilations[i] for k in range(places)]
        taps.append(
            _linear(op, origin + op.Reshape(op.constant(index, dtype_of(x)), [1, -1, 1, 1]) + op.Gather(offsets, op.i64(i), axis=2))
        )
    base = op.Reshape(_starts(op, images, 4), [-1, 1, 1, 1])
    seen = _total(op, _sample(op, _rows(op, images, 4), base, sizes, taps, masked=True))  # (N * og, places, oh, ow, C / og)
    if mask is not None:
        seen = seen * op.Unsqueeze(op.Reshape(mask, [-1, places, *out]), [-1])
    columns = op.Transpose(seen, perm=[0, 4, 1, 2, 3])  # channels, then kernel places, as the weight has them
    columns = op.Reshape(columns, [op.dim(x, 0), group, _divided(op, channels, group, places), -1])
    weight = op.Reshape(w, [group, -1, _divided(op, channels, group, places)])
    y = op.Reshape(op.MatMul(weight, columns), [op.dim(x, 0), op.dim(w, 0), *out])
    return y if b is None else y + op.Reshape(b, [1, -1, 1, 1])


def _divided(op: Builder, channels: Dim, group: int, places: int) -> Dim:
    if isinstance(channels, int):
        return channels // group * places
    return op.Mul(op.Div(channels, op.i64([group])), op.i64([places]))


@gradient("Det")
def det(op: Builder, g: Value, x: Value, *, node: ir.Node) -> Value:
    """The cofactors: determinants of the matrix without one row and one column. No inverse, so singular matrices are fine."""
    rank = op.rank(node, x)
    n = next((d for d in (x.shape or ())[rank - 2 :] if isinstance(d, int)), None)
    if n is None:
        raise unsupported(node, "the size of its matrices is known only at run time")
    check_unrolled(node, n * n)
    g = op.Unsqueeze(g, [-1, -2])
    if n == 1:
        return op.expand_like(g, x)
    rest = [[j for j in range(n) if j != i] for i in range(n)]
    rows = op.Gather(x, op.i64(rest), axis=rank - 2)  # (..., i, n-1, n)
    minors = op.Gather(rows, op.i64(rest), axis=rank)  # (..., i, n-1, j, n-1)
    minors = op.Transpose(minors, perm=[*range(rank - 2), rank - 2, rank, rank - 1, rank + 1])
    signs = op.constant([[(-1.0) ** (i + j) for j in range(n)] for i in range(n)], dtype_of(g))
    return g * op.Det(minors) * signs
