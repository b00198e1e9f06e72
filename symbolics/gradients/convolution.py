"""Conv, ConvTranspose, Col2Im."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from symbolics.gradients.registry import Grads, Ints, gradient
from symbolics.gradients.windows import Dim, Windows, windows
from symbolics.graph.builder import Builder
from symbolics.graph.named import call
from symbolics.graph.values import dtype_of, static_shape
from symbolics.node.limits import MAX_UNROLLED

__all__ = ["columns"]

_FEW_CHANNELS, _MORE_CHANNELS = 16, 24
_MANY_PIXELS = 2**18
_MANY_POSITIONS = 32  # of a kernel
_FEW_PIXELS, _MANY_WEIGHTS = 16, 2**16
_MORE_PIXELS, _LIGHT = 256, 4096  # channels of one side times the other's


def _kernel(op: Builder, node: ir.Node, w: Value, kernel_shape: Ints) -> list[Dim]:
    return list(kernel_shape) if kernel_shape else [op.dim(w, i + 2) for i in range(op.rank(node, w) - 2)]


@gradient("Conv")
def conv(op: Builder, g: Value, x: Value, w: Value, b: Value | None, *, y: Value, node: ir.Node, group: int, kernel_shape: Ints) -> Grads:
    slide = windows(op, node, x, y, _kernel(op, node, w, kernel_shape))
    db = _bias(op, slide, g, b)
    return [_input(op, slide, g, w, group), _weight(op, slide, x, g, w, group), db]


@gradient("ConvTranspose")
def conv_transpose(
    op: Builder, g: Value, x: Value, w: Value, b: Value | None, *, y: Value, node: ir.Node, group: int, kernel_shape: Ints
) -> Grads:
    """The adjoint of a Conv of g: its input gradient is that Conv, its weight gradient the same with the sides swapped."""
    slide = windows(op, node, g, x, _kernel(op, node, w, kernel_shape))
    slide.large = y
    dx = op.Conv(slide.pad(g), w, strides=slide.strides, dilations=slide.dilations, group=group)
    db = _bias(op, slide, g, b)
    return [dx, _weight(op, slide, g, x, w, group), db]


def _bias(op: Builder, slide: Windows, g: Value, b: Value | None) -> Value | None:
    return None if b is None else op.ReduceSum(g, [0, *range(2, slide.rank + 2)], keepdims=0)


def _input(op: Builder, slide: Windows, g: Value, w: Value, group: int) -> Value:
    """The adjoint of the convolution for its input: the transposed one, of small images one product for all samples, of large ones with few
    channels, and of one channel a group, a Conv (`_turned`).

    onnxruntime's ConvTranspose multiplies a sample at a time and reads all weights for each: of images of a few pixels that is most of what
    it does. One product gives the columns of all samples, and Col2Im adds them up.
    """
    shape, outs, sizes = static_shape(w), _known_sizes(slide.small), _known_sizes(slide.large)
    if shape is not None and shape[:2] == (group, 1) and group > 1 and (turned := _turned(op, slide, g, w, group)) is not None:
        return turned
    known = len(outs) == len(sizes) == slide.rank
    if (
        not known or group != 1 or shape is None or slide.static is None or dtype_of(w) is not ir.DataType.FLOAT
    ):  # of no other is there a Col2Im
        return slide.transposed(g, w, group)
    kernel, before, after = slide.static
    m, c, *_ = shape
    if min(before) < 0 or math.prod(kernel) == 1:
        return slide.transposed(g, w, group)
    if m <= c and m * c <= _LIGHT and math.prod(outs) >= _MORE_PIXELS and (turned := _turned(op, slide, g, w)) is not None:
        return turned
    if math.prod(outs) > _FEW_PIXELS or math.prod(shape) < _MANY_WEIGHTS:
        return slide.transposed(g, w, group)
    pads = [*before, *(max(a, 0) for a in after)]
    columns = op.Gemm(op.Reshape(w, [m, -1]), _rows(op, g, m, slide.rank), transA=1)
    columns = op.Transpose(op.Reshape(columns, [c * math.prod(kernel), -1, math.prod(outs)]), perm=[1, 0, 2])
    return op.Col2Im(columns, op.i64(sizes), op.i64(kernel), strides=slide.strides, dilations=slide.dilations, pads=pads)


def _turned(op: Builder, slide: Windows, g: Value, w: Value, group: int = 1) -> Value | None:
    """The same as a Conv with the weights turned around, of windows that move place by place; None for any other.

    ``group`` is 1, or as many as there are channels on either side.

    onnxruntime's Conv lays out what it reads, in as many threads as there are, and its ConvTranspose adds up what it wrote, in one: of
    large images with few channels that is the most of it.
    """
    if slide.static is None:
        return None
    kernel, before, after = slide.static
    reach = [(k - 1) * d for k, d in zip(kernel, slide.dilations)]
    pads = [r - p for side in (before, after) for r, p in zip(reach, side)]
    if set(slide.strides) != {1} or min(pads) < 0 or min(after) < 0:
        return None
    m, c, *_ = static_shape(w) or ()
    positions = math.prod(kernel)
    backwards = op.i64(range(positions)[::-1])
    if group > 1:
        turned = op.Reshape(op.Gather(op.Reshape(w, [m, positions]), backwards, axis=1), [m, 1, *kernel])
        return op.Conv(g, turned, pads=pads, dilations=slide.dilations, group=group)
    last = op.Gather(op.Transpose(op.Reshape(w, [m, c, positions]), perm=[2, 1, 0]), backwards, axis=0)
    turned = op.Reshape(op.Transpose(last, perm=[1, 2, 0]), [c, m, *kernel])
    return op.Conv(g, turned, pads=pads, dilations=slide.dilations)


def _known_sizes(value: Value) -> list[int]:
    """The sizes behind batch and channels that are numbers now."""
    return [size for size in (value.shape or ())[2:] if isinstance(size, int)]


def _rows(op: Builder, small: Value, m: int, rank: int) -> Value:
    """(N, M, ...) as (M, samples and windows)."""
    return op.memo(("rows of g", small), lambda: op.Reshape(op.Transpose(small, perm=[1, 0, *range(2, rank + 2)]), [m, -1]))


def _weight(op: Builder, slide: Windows, large: Value, small: Value, w: Value, group: int) -> Value:
    """The sum over samples and windows of large (N, G*C, ...) times small (N, G*M, ...): (G*M, C, *kernel).

    A call of ConvWeight, where the kernel and the padding are known.
    """
    shape, known = static_shape(w), slide.static
    if shape is None or known is None:
        return _weight_in_nodes(op, slide, large, small, w, group)
    kernel, before, after = known
    large.shape, small.shape = large.shape or slide.large.shape, small.shape or slide.small.shape

    def write(inside: Builder, given: Sequence[Value]) -> list[Value]:
        here = dataclasses.replace(slide, op=inside, large=given[0], small=given[1])
        like = Value(name="weights", type=w.type, shape=w.shape)  # of which the body asks the shape alone
        return [_weight_in_nodes(inside, here, given[0], given[1], like, group)]

    geometry = {"kernel_shape": kernel, "strides": slide.strides, "dilations": slide.dilations, "pads": [*before, *after], "group": [group]}
    return call(op, "ConvWeight", [large, small], write, results=[w], **geometry)[0]


def _weight_in_nodes(op: Builder, slide: Windows, large: Value, small: Value, w: Value, group: int) -> Value:
    kernel = (static_shape(w) or ())[2:]
    if group == 1 and slide.static is not None and kernel and math.prod(kernel) <= MAX_UNROLLED and slide.small.shape is not None:
        if all(type(d) is int for d in slide.small.shape[2:]):
            return _weight_by_columns(op, slide, large, small, w)
    samples, axes = op.dim(small, 0), range(slide.rank + 2)
    if isinstance(samples, int):
        return (
            _weight_by_conv(op, slide, slide.pad(large), small, w, group)
            if samples
            else op.zeros(op.vector([op.dim(w, i) for i in axes]), dtype_of(w))
        )
    # Of no samples one of zeros: onnxruntime's Conv of no channels writes nothing, and where the compiler left its loop in, it never ends.
    one = op.Cast(op.Equal(samples, op.i64([0])), to=ir.DataType.INT64)
    padded = op.padded(large, [0, 0, *slide.before], [one, 0, *slide.after], axes, slide.rank + 2)
    return _weight_by_conv(op, slide, padded, op.padded(small, [0], [one], [0], slide.rank + 2), w, group)


def _weight_by_columns(op: Builder, slide: Windows, large: Value, small: Value, w: Value) -> Value:
    """What each kernel position sees, side by side, then a product: several times faster than the Conv form.

    With channels last, a Gather of whole pixels lays them side by side; a product for each index of the first kernel axis
    keeps what it reads in the cache. Pixels of less channels are too short for that, huge images need too many indices:
    then Slices, with the batch behind the channels, and a product for each kernel position, or one for very few channels.
    """
    m, c, *kernel = static_shape(w) or ()
    outs = _known_sizes(slide.small)
    axes = list(range(2, slide.rank + 2))
    rows = _rows(op, small, m, slide.rank)
    positions = list(itertools.product(*[range(k) for k in kernel]))
    if c < _MORE_CHANNELS or len(positions) == 1 or len(positions) * math.prod(outs) > _MANY_PIXELS:
        turned = op.Transpose(slide.pad(large), perm=[1, 0, *axes])
        groups = [_seen(op, slide, turned, position, outs) for position in positions]
        if c < _FEW_CHANNELS and len(groups) > 1:
            groups = [op.Concat(*groups, axis=0)]
        parts = [op.Gemm(rows, op.Reshape(group, [len(positions) * c // len(groups), -1]), transB=1) for group in groups]
    else:
        samples = small.shape[0] if small.shape is not None else None
        if isinstance(samples, int) and samples * math.prod(outs) < m:  # what is seen is smaller than the product: it is turned
            return op.Reshape(op.Gemm(rows, columns(op, slide, large, c)), [m, c, *kernel])
        pixels, starts, offsets = _pixels(op, slide, large, c)
        offsets = offsets.reshape(kernel[0] if slide.rank > 1 else 1, -1)
        parts = []
        for offset in offsets:
            seen = op.Gather(pixels, op.constant((starts + offset).ravel(), ir.DataType.INT32), axis=1)
            parts.append(op.Gemm(rows, op.Reshape(seen, [-1, len(offset) * c])))
    return op.Reshape(_kernel_last(op, parts, m, c, len(positions)), [m, c, *kernel])


def _pixels(op: Builder, slide: Windows, large: Value, channels: int) -> tuple[Value, np.ndarray, np.ndarray]:
    """Pixels (N, places, channels); the places (windows, 1) where windows begin, and what to add for each kernel position."""
    kernel, *_ = slide.static or ([],)
    outs = _known_sizes(slide.small)
    sizes = slide.padded_sizes
    assert sizes is not None
    # Whole pixels are padded several times faster than rows of each channel.
    last = op.Transpose(large, perm=[0, *range(2, slide.rank + 2), 1])
    padded = op.padded(last, slide.before, slide.after, range(1, slide.rank + 1), slide.rank + 2)
    pixels = op.Reshape(padded, [0, math.prod(sizes), channels])
    return pixels, _numbers(sizes, outs, slide.strides)[:, None], _numbers(sizes, kernel, slide.dilations)


def columns(op: Builder, slide: Windows, large: Value, channels: int) -> Value:
    """What each window reads: (samples and windows, channels and kernel positions).

    The kernel, the padding, and the sizes of the small side are known.
    """
    pixels, starts, offsets = _pixels(op, slide, large, channels)
    seen = op.Gather(pixels, op.constant((starts + offsets).ravel(), ir.DataType.INT32), axis=1)
    turned = op.Transpose(op.Reshape(seen, [-1, len(offsets), channels]), perm=[0, 2, 1])
    return op.Reshape(turned, [-1, channels * len(offsets)])


def _kernel_last(op: Builder, parts: Sequence[Value], m: int, c: int, positions: int) -> Value:
    """Products (m, some positions times c), side by side (m, positions * c), with the positions behind the channels.

    A Transpose would do; onnxruntime moves it behind the squares of an optimizer, makes two of it, and either takes several
    times what it takes to interleave columns. Of very many positions the columns are too many nodes.
    """
    if positions == 1:
        return parts[0]
    each = positions // len(parts)
    if len(parts) == 1 or positions > _MANY_POSITIONS:
        product = op.Concat(*parts, axis=1) if len(parts) > 1 else parts[0]
        return op.Transpose(op.Reshape(product, [m, positions, c]), perm=[0, 2, 1])
    single = [v for p in parts for v in (op.node("Split", [p], outputs=each, axis=1, num_outputs=each) if each > 1 else (p,))]
    return op.Concat(*(op.Reshape(v, [m * c, 1]) for v in single), axis=1)


def _seen(op: Builder, slide: Windows, padded: Value, position: Sequence[int], outs: Sequence[int]) -> Value:
    """The pixels that one kernel position meets, a window each."""
    if slide.strides == [1] * slide.rank and math.prod(slide.kernel) == 1:
        return padded
    start = [p * d for p, d in zip(position, slide.dilations)]
    end = [s + (o - 1) * t + 1 for s, o, t in zip(start, outs, slide.strides)]
    return op.Slice(padded, start, end, list(range(2, slide.rank + 2)), slide.strides)


def _numbers(sizes: Sequence[int], counts: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """The numbers, in an array of these sizes, of every so many elements of each axis."""
    return np.ravel_multi_index(np.indices(counts) * np.reshape(steps, [-1] + [1] * len(counts)), sizes).ravel()


def _weight_by_conv(op: Builder, slide: Windows, padded: Value, small: Value, w: Value, group: int) -> Value:
    """A Conv whose kernel is the small side, samples in the place of channels; strides and dilations change places."""
    n = slide.rank
    axes = list(range(2, n + 2))
    swap = [1, 0, *axes]
    if group == 1:
        rows = op.Transpose(padded, perm=swap)
    else:  # (N, G*C, ...) to (C, G*N, ...)
        c, sizes = op.dim(w, 1), slide.padded_sizes
        if isinstance(c, int) and sizes is not None:
            split = op.Reshape(padded, [0, group, c, *sizes])
            rows = op.Reshape(op.Transpose(split, perm=[2, 1, 0, *[a + 1 for a in axes]]), [c, -1, *sizes])
        else:
            spatial = op.Shape(padded, start=2)
            split = op.Reshape(padded, op.Concat(op.vector([0, group, c]), spatial, axis=0))
            rows = op.Reshape(op.Transpose(split, perm=[2, 1, 0, *[a + 1 for a in axes]]), op.Concat(op.vector([c, -1]), spatial, axis=0))
    full = op.Conv(rows, op.Transpose(small, perm=swap), strides=slide.dilations, dilations=slide.strides, group=group)
    cut = op.Slice(full, [0] * n, op.vector([op.dim(w, a) for a in axes]), axes)
    return op.Transpose(cut, perm=swap)


@gradient("Col2Im")
def col2im(
    op: Builder, g: Value, x: Value, image: Value, block: Value, *, y: Value, node: ir.Node,
    strides: Ints, dilations: Ints, pads: Ints,
) -> Value:  # fmt: skip
    """The columns of g: for each kernel position what it sees, flattened."""
    kernel = op.ints(block)
    n = len(kernel) if kernel is not None else op.rank(node, y) - 2
    strides, dilations, pads = strides or [1] * n, dilations or [1] * n, pads or [0] * (2 * n)
    padded = op.Pad(g, [0, 0, *pads[:n], 0, 0, *pads[n:]]) if any(pads) else g
    if kernel is None or math.prod(kernel) > MAX_UNROLLED:
        return op.reshape_like(_columns_by_numbers(op, padded, image, block, strides, dilations, pads), x)
    columns = []
    lengths = op.vector([op.dim(y, i + 2) for i in range(n)])
    for position in itertools.product(*[range(k) for k in kernel]):
        start = [p * d for p, d in zip(position, dilations)]
        # the last place that this kernel position reaches is that far from the end of the padded image
        left = [(k - 1 - p) * d for k, p, d in zip(kernel, position, dilations)]
        end = op.Add(lengths, op.i64([pads[i] + pads[i + n] - left[i] for i in range(n)]))
        columns.append(op.Reshape(op.Slice(padded, start, end, list(range(2, n + 2)), strides), [0, 0, 1, -1]))
    return op.reshape_like(op.Concat(*columns, axis=2) if len(columns) > 1 else columns[0], x)


def _columns_by_numbers(
    op: Builder, padded: Value, image: Value, block: Value, strides: Sequence[int], dilations: Sequence[int], pads: Sequence[int]
) -> Value:
    """The same with a block whose shape is known only at run time: gather by computed places, axis by axis."""
    n = len(strides)
    for i in range(n):
        axis = 2 + 2 * i  # axes before are (kernel, window) pairs already
        one, k = op.i64([1]), op.Slice(block, [i], [i + 1])
        size = op.Add(op.Slice(image, [i], [i + 1]), op.i64([pads[i] + pads[i + n]]))
        reach = op.Sub(op.Sub(size, op.Mul(op.Sub(k, one), op.i64([dilations[i]]))), one)
        count = op.Add(op.Div(reach, op.i64([strides[i]])), one)
        first = op.Mul(op.Range(op.i64(0), op.Squeeze(k), op.i64(1)), op.i64(dilations[i]))
        step = op.Mul(op.Range(op.i64(0), op.Squeeze(count), op.i64(1)), op.i64(strides[i]))
        padded = op.Gather(padded, op.Add(op.Unsqueeze(first, [1]), op.Unsqueeze(step, [0])), axis=axis)
    order = [0, 1, *[2 + 2 * i for i in range(n)], *[3 + 2 * i for i in range(n)]]
    return op.Transpose(padded, perm=order)
