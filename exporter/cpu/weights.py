"""Gradients of convolutions for their weights, claimed by their name (`exporter.runtime.claims`).

As standard operators they are products that read each place of an image for every position of the kernel, which something has to lay out
in memory. Two forms do that faster:

- with AVX-512, one node of the native library, which lays out what a task needs in the caches (native/convolution.c);
- else products of what Rearrange has laid out in the order of the weights. Where windows move place by place, what the first axis of the kernel does
  is done to the other side: of 3x3 positions, images and gradients are laid out three times each, in place of nine times and once, and one product
  is all. It multiplies zeros with places of the image that no gradient belongs to: of an image that is not finite, more positions of the
  gradient are NaN than the operators' would be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from exporter.cpu.moved import FLOATS, MOST_AXES
from exporter.cpu.moves import rearranged
from exporter.cpu.operators import DOMAIN, has_wide_vectors
from exporter.cpu.views import FAR, Axis, View
from exporter.runtime.claims import ConvWeight
from exporter.runtime.facts import ShapeAndType
from symbolics.graph.emitter import Emitter

__all__ = ["CONV_WEIGHT_GRAD", "conv_weight"]

CONV_WEIGHT_GRAD = "ConvWeightGrad"

_MOST_KERNEL, _MOST_STRIDE, _MOST_DILATION = 64, 16, 64  # no more than in native/convolution.c
_MOST_WIDE = 512  # windows of a row: longer ones fill the caches
_FEW_RESULTS = 16  # of the 32 that are computed at once
_FEW_PLACES = 64  # of an image: of fewer, what begins and ends a row of windows is most of it
_FEW_CHANNELS, _MANY_POSITIONS = 24, 32  # of fewer channels, or a larger kernel, the body's products are as good
_MOST_WASTE = 1.3  # times as many places: the zeros are multiplied, too


def conv_weight(op: Emitter, node: ir.Node, facts: Mapping[ir.Value, ShapeAndType]) -> list[ir.Value] | None:
    """What stands for a call of ConvWeight; None where the nodes of its body are as good.

    Args:
        op: Takes the nodes.
        node: The call.
        facts: Shapes and types of values. They may be wrong: the native library compares the shape of what it reads.
    """
    found = ConvWeight.of(node, facts)
    if found is None or found.group != 1 or found.kind not in FLOATS:
        return None
    channels, results, positions = found.images[1], found.outs[1], math.prod(found.kernel)
    if channels is None or results is None or channels < _FEW_CHANNELS or not 1 < positions <= _MANY_POSITIONS:
        return None
    if (found.images[0] or found.outs[0]) != (found.outs[0] or found.images[0]) or None in (*found.images[2:], *found.outs[2:]):
        return None
    if found.outs[0] is not None and math.prod(size or 0 for size in (found.outs[0], *found.outs[2:])) < results:
        return None  # what is seen is smaller than the product
    made = _in_one_node(op, found) or _in_products(op, found, channels, results)
    return None if made is None else [op.Reshape(made, op.i64([results, channels, *found.kernel]))]


def _in_one_node(op: Emitter, found: ConvWeight) -> ir.Value | None:
    """The node of the native library; None where it has none, or is not faster."""
    if not has_wide_vectors() or len(found.kernel) != 2 or found.kind is not ir.DataType.FLOAT:
        return None
    moves = zip((found.kernel, found.strides, found.dilations), (_MOST_KERNEL, _MOST_STRIDE, _MOST_DILATION))
    if any(number > most for numbers, most in moves for number in numbers):
        return None
    _, results, high, wide = (size or 0 for size in found.outs)
    if results < _FEW_RESULTS or high * wide < _FEW_PLACES or wide > _MOST_WIDE:
        return None
    made: ir.Value = op.node(
        CONV_WEIGHT_GRAD, [found.large, found.small], domain=DOMAIN,
        kernel=found.kernel, strides=found.strides, dilations=found.dilations, starts=[-padding for padding in found.before],
        images=_said(found.images), gradients=_said(found.outs),
    )  # fmt: skip
    made.type = ir.TensorType(ir.DataType.FLOAT)
    made.shape = ir.Shape([results * (found.images[1] or 0), math.prod(found.kernel)])
    return made


def _said(shape: Sequence[int | None]) -> list[int]:
    return [-1 if dim is None else dim for dim in shape]


def _in_products(op: Emitter, found: ConvWeight, channels: int, results: int) -> ir.Value | None:
    """The gradient (results * channels, positions) as products; None where the body's are as good.

    Windows that move by more than a place are better read as whole pixels, as the body does.
    """
    rows, columns = _rows(found), _columns(found)
    if found.strides[-1] != 1 or len(columns.axes()) >= MOST_AXES or not _is_near(columns):
        return None
    if (shared := _shared(rows, columns)) is not None:
        left, right = (rearranged(op, view, found.kind) for view in shared)
        outer = columns.groups[1][0].size or 1
        product = op.Gemm(left, right, transB=1)
        others = math.prod(found.kernel) // outer
        product.shape = ir.Shape([outer * results, channels * others])
        parted = op.Reshape(product, op.i64([results, outer, channels, others]))
        return op.Reshape(op.Transpose(parted, perm=[0, 2, 1, 3]), op.i64([results * channels, -1]))
    small = op.Transpose(found.small, perm=[1, 0, *range(2, len(found.outs))])
    flat = op.Reshape(small, op.i64([results, -1]))
    # In as many products as the kernel has rows, each of some channels: what one reads is to stay in the cache.
    parts = next(part for part in range(found.kernel[0], channels + 1) if channels % part == 0) if found.kernel[0] <= channels else 1
    apart = columns.reshaped([parts, channels // parts * math.prod(found.kernel), -1])
    if apart is None:
        return None
    views = [apart.at(0, part) for part in range(parts)] if parts > 1 else [apart]
    products = [op.Gemm(flat, rearranged(op, View(v.source, v.dims, v.starts, v.groups[1:], 1), found.kind), transB=1) for v in views]
    return op.Reshape(op.Concat(*products, axis=1) if parts > 1 else products[0], op.i64([results * channels, -1]))


def _rows(found: ConvWeight) -> View:
    """What windows give: (results, windows)."""
    image, result, *places = View.of(found.small, found.outs).groups
    return View(found.small, found.outs, (0,) * len(found.outs), (result, (*image, *(axis for place in places for axis in place))), 1)


def _columns(found: ConvWeight) -> View:
    """What windows read: (channels, kernel positions, windows)."""
    rank = len(found.kernel)
    image, channel, *_ = View.of(found.large, found.images).groups

    def grid(sizes: Sequence[int | None], steps: Sequence[int]) -> tuple[Axis, ...]:
        moved = [tuple(step if dim == place + 2 else 0 for dim in range(rank + 2)) for place, step in enumerate(steps)]
        return tuple(Axis(size, step) for size, step in zip(sizes, moved, strict=True) if size != 1)

    groups = (channel, grid(found.kernel, found.dilations), (*image, *grid(found.outs[2:], found.strides)))
    return View(found.large, found.images, (0, 0, *(-padding for padding in found.before)), groups, 1)


def _is_near(view: View) -> bool:
    return all(abs(number) < FAR for number in (*view.starts, *(n for axis in view.axes() for n in (axis.size or 0, *axis.steps))))


def _shared(rows: View, columns: View) -> tuple[View, View] | None:
    """(results and first axis of the kernel, places) and (channels and the kernel's other axes, places), where windows move place by place
    along that axis; None where they do not, or where too many places are zero.
    """
    channels, (down, *others), windows = columns.groups
    results, places = rows.groups
    moving = [k for k, axis in enumerate(windows) if [bool(step) for step in axis.steps] == [bool(step) for step in down.steps]]
    if len(moving) != 1:
        return None
    (k,) = moving
    window, place = windows[k], places[k]
    if max(window.steps) != 1 or place.size is None or down.size is None:
        return None
    (dim,) = (dim for dim, step in enumerate(place.steps) if step)
    step = max(down.steps)
    height = place.size + (down.size - 1) * step
    if height > _MOST_WASTE * place.size:
        return None
    back = Axis(down.size, tuple(-step if i == dim else 0 for i in range(len(rows.dims))))
    left = View(rows.source, rows.dims, rows.starts, ((*results, back), (*places[:k], Axis(height, place.steps), *places[k + 1 :])), 1)
    turned = ((*channels, *others), (*windows[:k], Axis(height, window.steps), *windows[k + 1 :]))
    return left, View(columns.source, columns.dims, columns.starts, turned, 1)
