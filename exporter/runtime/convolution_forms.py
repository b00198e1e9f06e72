"""Forms of the gradients of convolutions for their weights, for providers other than the CPU.

A rule writes these gradients as onnxruntime's CPU is quickest: what each position of a kernel sees, gathered pixel by pixel, and products of it. Of
one channel a group it is a Conv whose kernel is as large as an image.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir

from exporter.runtime.facts import ShapeAndType, find_facts, fixed_shape
from exporter.runtime.moved import MOVES, Slide, Views, slide_of
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import attr, dtype_of
from symbolics.graph.walk import remove_operators

__all__ = ["kernels_as_large_as_images", "weights_by_convolutions"]

_FEW_CHANNELS, _FEW_PLACES = 24, 64  # of an image: of fewer, the products are quicker
_MOST_WASTE = 20  # times as many products as the Conv has
_MOST_POSITIONS = 64  # of what the windows are for, along an axis: each is a Slice


def weights_by_convolutions(model: ir.Model) -> int:
    """A gradient for weights as one Conv: samples in the place of channels, the gradients as its kernel, strides and dilations changed.

    What OpenVINO lays out for the products takes half as long as they do; of this Conv it takes 0.65 to 0.97 of both together. On onnxruntime's own
    CPU provider it takes 1.3 to 2.4 times as long.

    Returns:
        How many gradients were written so.
    """
    candidates = [node for node in model.graph if node.op_type == "Concat" and node.domain == "" and attr(node, "axis") == 1]
    if not candidates:
        return 0
    facts: dict[ir.Value, ShapeAndType] = {}
    find_facts(model, facts)
    found = Views(model.graph, facts, through=True)
    scope = Scope(free_prefix(model.graph, "form/weights/"), lambda value: False)
    made = 0
    for node in candidates:
        parts = found.products_of(node)
        slide = None if parts is None else slide_of(found.of(parts[0]), parts[1])
        if slide is not None and found.kind(slide.large) is ir.DataType.FLOAT and _is_large(slide):
            op = Emitter(scope)
            replace(scope, node, op.nodes, [_swapped(op, slide)])
            made += 1
    scope.register(model.graph)
    if made:
        remove_operators(model.graph, frozenset({*MOVES, "Gemm", "Split"}))
    return made


def _is_large(slide: Slide) -> bool:
    """Whether the sizes are known, and the images large enough. A step backwards is no stride, which a Conv has none of."""
    images, channels, *_ = slide.images
    if None in (*slide.images, *slide.outs) or not images or not channels or channels < _FEW_CHANNELS:
        return False
    return min(*slide.strides, *slide.dilations) > 0 and max(slide.starts) <= 0 and np.prod(np.array(slide.outs[2:], float)) >= _FEW_PLACES


def _swapped(op: Emitter, slide: Slide) -> ir.Value:
    """The gradient for weights (results * channels, kernel positions)."""
    ends = [
        begin + (out - 1) * stride + (kernel - 1) * dilation + 1 - size
        for begin, out, stride, kernel, dilation, size in zip(
            slide.starts, (n or 0 for n in slide.outs[2:]), slide.strides, slide.kernel, slide.dilations, (n or 0 for n in slide.images[2:])
        )
    ]
    pads = [*(-begin for begin in slide.starts), *(max(end, 0) for end in ends)]
    large, small = (op.Transpose(value, perm=[1, 0, 2, 3]) for value in (slide.large, slide.small))
    full = op.Conv(large, small, strides=slide.dilations, dilations=slide.strides, pads=pads)
    if min(ends) < 0:  # what no window reaches would be further positions
        full = op.Slice(full, op.i64([0, 0]), op.i64(slide.kernel), op.i64([2, 3]))
    swapped = op.Transpose(full, perm=[1, 0, 2, 3])
    return op.Reshape(swapped, op.i64([(slide.images[1] or 0) * (slide.outs[1] or 0), slide.kernel[0] * slide.kernel[1]]))


def kernels_as_large_as_images(model: ir.Model) -> int:
    """A Conv of one channel a group whose kernel is as large as an image, and is computed: products of rows of pixels, of which diagonals are summed.

    So the gradient for weights of a depthwise convolution is written. OpenVINO takes 1.1 to 2.2 times as long for it as for the products.

    Returns:
        How many were written so.
    """
    candidates = [node for node in model.graph if node.op_type == "Conv" and node.domain == "" and (attr(node, "group") or 1) > 1]
    if not candidates:
        return 0
    facts: dict[ir.Value, ShapeAndType] = {}
    find_facts(model, facts)
    scope = Scope(free_prefix(model.graph, "form/kernels/"), lambda value: False)
    made = 0
    for node in candidates:
        op = Emitter(scope)
        if (result := _by_rows(op, node, facts)) is not None:
            replace(scope, node, op.nodes, [result])
            made += 1
    scope.register(model.graph)
    return made


def _by_rows(op: Emitter, node: ir.Node, facts: dict[ir.Value, ShapeAndType]) -> ir.Value | None:
    """The products: of each row of the image, moved across by each place, with each row of the kernel; where the two rows belong together they are
    summed. None where a Conv is none of these, or is quicker.
    """
    x, w = node.inputs[0], node.inputs[1]
    if len(node.inputs) > 2 or x is None or w is None or w.const_value is not None or dtype_of(w) is not ir.DataType.FLOAT:
        return None
    shape, kernel = fixed_shape(x, facts), fixed_shape(w, facts)
    if shape is None or kernel is None or len(shape) != 4 or len(kernel) != 4:
        return None
    groups, samples, height, width = kernel
    _, _, tall, wide = shape
    down, across = attr(node, "strides") or (1, 1)
    plain = (
        not any(attr(node, "pads") or ()) and not {*(attr(node, "dilations") or ())} - {1} and attr(node, "auto_pad") in (None, "NOTSET")
    )
    outs = [(tall - height) // down + 1, (wide - width) // across + 1]
    if not plain or groups != attr(node, "group") or shape[:2] != (1, groups * samples) or min(*outs, samples) < 1:
        return None
    if height * width < _FEW_PLACES or tall > _MOST_WASTE * outs[0] or outs[1] > _MOST_POSITIONS:
        return None
    rows = op.Transpose(op.Reshape(x, op.i64([groups, samples, tall, wide])), perm=[0, 2, 1, 3])
    moved = [
        op.Reshape(op.Slice(rows, op.i64([first]), op.i64([first + width]), op.i64([3])), op.i64([groups, 1, tall, samples * width]))
        for first in range(0, outs[1] * across, across)
    ]
    image = op.Reshape(op.Concat(*moved, axis=1) if len(moved) > 1 else moved[0], op.i64([groups, outs[1] * tall, samples * width]))
    turned = op.Reshape(op.Transpose(w, perm=[0, 1, 3, 2]), op.i64([groups, samples * width, height]))
    product = op.Reshape(op.MatMul(image, turned), op.i64([groups, outs[1], tall * height]))
    places = [(y + i * down) * height + y for i, y in itertools.product(range(outs[0]), range(height))]
    together = op.Gather(product, op.constant(np.array(places), ir.DataType.INT32), axis=2)
    sums = op.ReduceSum(op.Reshape(together, op.i64([groups, outs[1], outs[0], height])), op.i64([3]), keepdims=0)
    return op.Reshape(op.Transpose(sums, perm=[0, 2, 1]), op.i64([1, groups, *outs]))
