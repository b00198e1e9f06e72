"""Forms of the gradients of convolutions for their weights, for providers other than the CPU.

The body of such a gradient is what onnxruntime's CPU is quickest at: what each position of a kernel sees, gathered pixel by pixel, and products of it. Of
one channel a group it is a Conv whose kernel is as large as an image.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from exporter.runtime.claims import ConvWeight, claim
from exporter.runtime.facts import ShapeAndType
from symbolics.graph.emitter import Emitter

__all__ = ["weights_of_convolutions"]

_FEW_CHANNELS, _FEW_PLACES = 24, 64  # of an image: of fewer, the body's products are quicker
_MOST_KERNEL = 32  # positions
_MOST_WASTE = 20  # times as many products as the Conv has
_MOST_POSITIONS = 64  # of what the windows are for, along an axis: each is a Slice


def weights_of_convolutions(model: ir.Model) -> int:
    """Gradients for weights where the sizes are known and the images large enough: as one Conv, or of one channel a group as products of rows.

    Returns:
        How many gradients were written so.
    """
    return claim(model, {"ConvWeight": _claimed})


def _claimed(op: Emitter, node: ir.Node, facts: Mapping[ir.Value, ShapeAndType]) -> list[ir.Value] | None:
    made = _form(op, node, facts)
    return None if made is None else [made]


def _form(op: Emitter, node: ir.Node, facts: Mapping[ir.Value, ShapeAndType]) -> ir.Value | None:
    found = ConvWeight.of(node, facts)
    if found is None or len(found.kernel) != 2 or found.kind is not ir.DataType.FLOAT:
        return None
    images, outs = ([size for size in shape if size] for shape in (found.images, found.outs))
    if len(images) < 4 or len(outs) < 4 or math.prod(outs[2:]) < _FEW_PLACES:
        return None
    if found.group == 1:
        return _swapped(op, found, images[1])
    return _by_rows(op, found, images, outs) if images[1] == outs[1] == found.group else None


def _swapped(op: Emitter, found: ConvWeight, channels: int) -> ir.Value | None:
    """One Conv: samples in the place of channels, the gradients as its kernel, strides and dilations changed.

    What OpenVINO lays out for the products takes half as long as they do; of this Conv it takes 0.65 to 0.97 of both together. On onnxruntime's own
    CPU provider it takes 1.3 to 2.4 times as long.
    """
    if channels < _FEW_CHANNELS or not 1 < math.prod(found.kernel) <= _MOST_KERNEL or min(found.before) < 0:
        return None
    pads = [*found.before, *(max(padding, 0) for padding in found.after)]
    large, small = (op.Transpose(value, perm=[1, 0, 2, 3]) for value in (found.large, found.small))
    full = op.Conv(large, small, strides=found.dilations, dilations=found.strides, pads=pads)
    if min(found.after) < 0:  # what no window reaches would be further positions
        full = op.Slice(full, op.i64([0, 0]), op.i64(found.kernel), op.i64([2, 3]))
    turned: ir.Value = op.Transpose(full, perm=[1, 0, 2, 3])
    return turned


def _by_rows(op: Emitter, found: ConvWeight, images: list[int], outs: list[int]) -> ir.Value | None:
    """Of one channel a group, windows that move place by place: products of each row of the image, moved across by each position of the kernel, with each row
    of the gradient; where the two rows belong together they are summed.

    OpenVINO takes 1.1 to 2.2 times as long for the Conv of the body, whose kernel is as large as an image.
    """
    samples, groups, *sizes = images
    *_, height, width = outs
    tall, (down, across) = sizes[0] + found.before[0] + found.after[0], found.dilations
    if {*found.strides} != {1} or tall > _MOST_WASTE * found.kernel[0] or found.kernel[1] > _MOST_POSITIONS:
        return None
    pads = [0, 0, *found.before, 0, 0, *found.after]
    rows = op.Transpose(op.Pad(found.large, op.i64(pads)) if any(pads) else found.large, perm=[1, 2, 0, 3])
    moved = [
        op.Reshape(op.Slice(rows, op.i64([first]), op.i64([first + width]), op.i64([3])), op.i64([groups, 1, tall, samples * width]))
        for first in range(0, found.kernel[1] * across, across)
    ]
    image = op.Reshape(op.Concat(*moved, axis=1) if len(moved) > 1 else moved[0], op.i64([groups, found.kernel[1] * tall, samples * width]))
    turned = op.Reshape(op.Transpose(found.small, perm=[1, 0, 3, 2]), op.i64([groups, samples * width, height]))
    product = op.Reshape(op.MatMul(image, turned), op.i64([groups, found.kernel[1], tall * height]))
    places = [(y + i * down) * height + y for i, y in itertools.product(range(found.kernel[0]), range(height))]
    together = op.Gather(product, op.constant(np.array(places), ir.DataType.INT32), axis=2)
    sums = op.ReduceSum(op.Reshape(together, op.i64([groups, found.kernel[1], found.kernel[0], height])), op.i64([3]), keepdims=0)
    weights: ir.Value = op.Reshape(op.Transpose(sums, perm=[0, 2, 1]), op.i64([groups, 1, *found.kernel]))
    return weights
