"""Transposed convolutions whose windows move by two, as convolutions without strides, one for each phase.

onnxruntime multiplies an image at a time and adds up what each position of the kernel gives to places of the result. Of places that are an
even number of places apart, each reads images and weights as a Conv does: of 3x3 weights those of four phases are 1x1, 1x2, 2x1 and 2x2, with
as many products together. In memory each of them is a Conv of channels in blocks (exporter/cpu/blocked.py), all of the same
images in blocks, and a node of the native library puts the places beside each other: the gradient for 16 images of 32x32 from 64 channels of
16x16 takes 0.82 instead of 1.26 ms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from exporter.cpu.blocked import BLOCKED_DOMAIN, block_size, count_windows, sizes_as_read, turned_weights, weights_of_images
from exporter.cpu.declared import forget
from exporter.cpu.operators import DOMAIN
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import attr, static_shape

__all__ = ["INTERLEAVE", "convolve_phases"]

INTERLEAVE = "Interleave"

_MOST_STRIDE = 2  # as in native/interleave.c
_WINDOWS, _IMAGE = 384, 32  # so many at least, of which an image is as many: for each of them, onnxruntime's operator reads all weights
_PRODUCTS = 2**23  # of numbers: of less, waking threads for each phase is what counts


@dataclass(frozen=True)
class _Phase:
    """Along an axis, the places of the result with one remainder by the stride.

    Attributes:
        positions: Of the kernel, those that reach them, the last one first, as a Conv reads them; none: the places are zero.
        before, after: The padding of that Conv.
    """

    positions: tuple[int, ...]
    before: int = 0
    after: int = 0


def convolve_phases(model: ir.Model, sizes: Mapping[str, int] | None = None) -> int:
    """Replace what is written above in a model for onnxruntime's CPU with the native library, where the shapes are known.

    Args:
        model: Changed.
        sizes: As `block_channels` has it.

    Returns:
        How many nodes were replaced.
    """
    found = [(node, axes) for node in model.graph if (axes := _phases(node, sizes or {})) is not None]
    size = block_size() if found else 0
    found = [(node, axes) for node, axes in found if size and not any(n % size for n in (static_shape(node.inputs[1]) or ())[:2])]
    if not found:
        return 0
    scope = Scope(free_prefix(model.graph, "phases/"), lambda value: False)
    checked = [value for node, _ in found for value in node.inputs[:2]]
    for node, axes in found:
        op = Emitter(scope)
        made = _interleaved(op, node, axes, size)
        shape = made.shape
        replace(scope, node, op.nodes, [made])
        made.shape = shape  # not what the file says of it
    forget(checked)
    scope.register(model.graph)
    model.opset_imports[BLOCKED_DOMAIN] = model.graph.opset_imports[DOMAIN] = 1
    return len(found)


def _phases(node: ir.Node, sizes: Mapping[str, int]) -> list[list[_Phase]] | None:
    """The phases along each axis of a ConvTranspose of one group that has enough to do; None for any other."""
    if node.op_type != "ConvTranspose" or node.domain or attr(node, "group", 1) != 1 or not (shape := weights_of_images(node)):
        return None
    kernel, pads = shape[2:], attr(node, "pads") or [0] * 4
    strides, more = attr(node, "strides") or [1, 1], attr(node, "output_padding") or [0, 0]
    if attr(node, "output_shape") is not None or any(d != 1 for d in attr(node, "dilations") or []) or max(strides) == 1:
        return None
    if [len(said) for said in (pads, strides, more)] != [4, 2, 2] or max(strides) > _MOST_STRIDE or min(strides) < 1 or min(more) < 0:
        return None
    images, windows = count_windows(node.inputs[0], sizes)
    if images * (windows + _IMAGE) < _WINDOWS or images * windows * math.prod(shape) < _PRODUCTS:
        return None
    outs = _result(node)
    axes = [_along(*facts) for facts in zip(kernel, strides, pads, (node.inputs[0].shape or ())[2:], outs)]  # type: ignore[union-attr]
    found = [phase for axis in axes for phase in axis]
    if min(outs) < max(strides) or any(min(phase.before, phase.after) < 0 for phase in found):
        return None  # a phase without places, or whose windows leave images out
    return axes if not any(node.inputs[2:]) or all(phase.positions for phase in found) else None


def _result(node: ir.Node) -> list[int]:
    """Height and width of what a ConvTranspose computes, whatever the file says of it."""
    kernel, pads = (static_shape(node.inputs[1]) or ())[2:], attr(node, "pads") or [0] * 4
    images = [size for size in ((node.inputs[0] and node.inputs[0].shape) or ())[2:] if isinstance(size, int)]
    more = attr(node, "output_padding") or [0, 0]
    facts = zip(images, attr(node, "strides") or [1, 1], kernel, more, pads, pads[2:])
    return [(size - 1) * stride + k + behind - first - last for size, stride, k, behind, first, last in facts]


def _along(kernel: int, stride: int, pad: int, size: int, out: int) -> list[_Phase]:
    """The phases along an axis: place o of the result reads image i at position o + pad - i * stride of the kernel."""
    found = []
    for remainder in range(stride):
        positions = tuple(k for k in range(kernel)[::-1] if (remainder + pad - k) % stride == 0)
        if not positions:
            found.append(_Phase(()))
            continue
        first, last = ((remainder + pad - k) // stride for k in (positions[0], positions[-1]))  # what its first place reads
        places = (out - remainder + stride - 1) // stride
        found.append(_Phase(positions, -first, places - 1 + last - (size - 1)))
    return found


def _interleaved(op: Emitter, node: ir.Node, axes: list[list[_Phase]], size: int) -> ir.Value:
    """The node whose inputs are the results of the phases, in blocks."""
    x, w, *bias = node.inputs
    assert x is not None and w is not None
    channels, results, height, width = static_shape(w) or ()
    checked = op.Reshape(w, sizes_as_read(op, x, w, [channels, results, height, width], 0))
    checked.shape = ir.Shape([channels, results, height, width])  # nothing else can come of it
    turned = turned_weights(op, checked, [channels, results, height, width], size)
    blocks = op.node("ReorderInput", [x], domain=BLOCKED_DOMAIN)
    parts: list[ir.Value] = []
    places: list[int] = []
    for down, across in itertools.product(*axes):
        positions = [k * width + j for k in down.positions for j in across.positions]
        places.append(len(parts) if positions else -1)
        if positions:
            kernel = [len(down.positions), len(across.positions)]
            weights = turned if height * width == 1 else op.Gather(turned, op.i64(positions), axis=1)
            weights = op.Reshape(weights, op.i64([results, channels, *kernel]))
            pads = [down.before, across.before, down.after, across.after]
            parts.append(op.node("Conv", [blocks, weights, *bias], domain=BLOCKED_DOMAIN, kernel_shape=kernel, pads=pads))
    images, shape, strides = x.shape[0] if x.shape is not None else None, [results, *_result(node)], [len(axis) for axis in axes]
    said = [images if isinstance(images, int) else -1, *shape]
    made: ir.Value = op.node(INTERLEAVE, parts, domain=DOMAIN, strides=strides, images=said, block=[size], phases=places)
    made.type = ir.TensorType(ir.DataType.FLOAT)
    made.shape = ir.Shape([images, *shape])
    return made
