"""Convolutions by the kernels that onnxruntime has for channels in blocks (domain com.microsoft.nchwc).

Its optimizer calls them where weights are constants. In a training step and in a loaded module they are inputs, so the graph says it
here, in memory: the images and the weights in blocks, the Conv of that domain, and its result as it was. That is worth the turning for

- one result a group: onnxruntime's other kernel lays out what each window reads and multiplies one row with it, 4 ms for 96 channels
  of 16x16 pixels, eight images and 7x7 weights, where torch takes 0.4 and these 0.7;
- one group and many windows for each weight: 16 images of 128 channels on 8x8 and 3x3 weights take 0.6 instead of 0.95 ms, and so does
  the gradient for the images, a ConvTranspose, which is a Conv with the weights turned around.

The gradient of a depthwise Conv for its weights is a Conv with one group a channel, each of which reads all images. It is one Conv of as
many channels as there are channels and images together, and a sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from exporter.cpu.declared import forget, is_certain, row_if_declared
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import attr, static_shape

__all__ = ["BLOCKED_DOMAIN", "block_channels", "block_size", "count_windows", "sizes_as_read", "turned_weights", "weights_of_images"]

BLOCKED_DOMAIN = "com.microsoft.nchwc"
_SIZES = (16, 8)  # with AVX-512 and without
_WINDOWS = {"Conv": 512, "ConvTranspose": 128}  # so many at least, in all images: the weights of the latter are turned faster
_MOST_POSITIONS = 2**10  # of a kernel: passes list them
_PRODUCTS = 2**26  # of numbers: of less, waking threads once more is what counts
_PROBE = """
    <ir_version: 9, opset_import: ["": 18]>
    probe (float[1,16,1,2] x, float[16,1,1,2] w) => (float[1,16,1,1] y) { y = Conv <group = 16> (x, w) }
"""


@functools.cache
def block_size() -> int:
    """How many channels a block has for onnxruntime on this processor, found by trying; 0 where it has no such kernels."""
    import onnxruntime

    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((1, 16, 1, 2), (16, 1, 1, 2)))
    expected = (x * w.reshape(1, 16, 1, 2)).sum(-1, keepdims=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    for size in _SIZES:
        model = ir.from_proto(onnx.parser.parse_model(_PROBE))
        _replace(model, list(model.graph), size)
        try:
            session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
            (found,) = session.run(None, {"x": x, "w": w})
        except Exception:  # onnxruntime has errors of many classes for what it does not know
            continue
        if np.allclose(found, expected, atol=1e-5):
            return size
    return 0


def block_channels(model: ir.Model, sizes: Mapping[str, int] | None = None) -> int:
    """Replace what is written above in a model for onnxruntime's CPU, where the shapes are known.

    Args:
        model: Changed.
        sizes: name of an open size -> what it is likely to be: how many images there are. Others are right, too, but may be slower.

    Returns:
        How many nodes were replaced.
    """
    nodes = [node for node in model.graph if node.domain == "" and (_one_result_a_group(node) or _many_windows(node, sizes or {}))]
    return _replace(model, nodes, size) if nodes and (size := block_size()) else 0


def weights_of_images(node: ir.Node) -> list[int]:
    """The shape of the weights, which are no constant, of a convolution of images of float32; else nothing."""
    x, w = (*node.inputs[:2], None, None)[:2]  # a damaged file may give none
    shape = static_shape(w)
    if not _says_windows(node):
        return []
    if x is None or w is None or shape is None or len(shape) != 4 or x.dtype is not ir.DataType.FLOAT or w.const_value is not None:
        return []
    if attr(node, "auto_pad", "NOTSET") != "NOTSET" or math.prod(shape[2:]) > _MOST_POSITIONS:
        return []
    return list(shape) if list(attr(node, "kernel_shape") or shape[2:]) == list(shape[2:]) else []


#: Attributes of convolutions of images -> how many ints they are, none of which is negative, or zero where it is no padding; None: one int.
_SAID = {"pads": 4, "strides": 2, "dilations": 2, "kernel_shape": 2, "output_padding": 2, "group": None}


def _says_windows(node: ir.Node) -> bool:
    """Whether attributes are of the types and lengths that onnxruntime takes: passes run before it has looked at a file."""
    for name, count in _SAID.items():
        said = node.attributes.get(name)
        kind = ir.AttributeType.INT if count is None else ir.AttributeType.INTS
        if said is None:
            continue
        if said.is_ref() or said.type is not kind:
            return False
        numbers = [said.as_int()] if count is None else said.as_ints()
        if len(numbers) != (count or 1) or min(numbers) < (0 if "pad" in name else 1):
            return False
    return True


def _one_result_a_group(node: ir.Node) -> bool:
    """Whether a Conv has one result a group."""
    if node.op_type != "Conv" or not (shape := weights_of_images(node)):
        return False
    return 1 < attr(node, "group", 1) == shape[0] and (shape[1] == 1 or not any(node.inputs[2:]))


def count_windows(side: ir.Value | None, sizes: Mapping[str, int]) -> tuple[int, int]:
    """How many images and windows of each a convolution has, by the side that has an element a window: (N, C, H, W).

    Args:
        side: The result of a Conv, what a ConvTranspose reads.
        sizes: As `block_channels` has it; an open number of images that is not among them counts as 1.

    Returns:
        No windows where the shape is not known.
    """
    shape = side.shape if side is not None else None
    places = [size for size in (shape or ())[2:] if isinstance(size, int)]
    if shape is None or len(shape) != 4 or len(places) != 2:
        return 1, 0
    images = shape[0] if isinstance(shape[0], int) else sizes.get(str(shape[0].value), 1)
    return images, math.prod(places)


def _many_windows(node: ir.Node, sizes: Mapping[str, int]) -> bool:
    """Whether a Conv of one group, or a ConvTranspose that is one, has enough to do for each weight that is turned."""
    if node.op_type not in _WINDOWS or attr(node, "group", 1) != 1 or not (shape := weights_of_images(node)) or math.prod(shape[2:]) == 1:
        return False
    if node.op_type == "ConvTranspose":
        kernel, dilations, pads = shape[2:], attr(node, "dilations") or [1, 1], attr(node, "pads") or [0] * 4
        moves = any(stride != 1 for stride in attr(node, "strides") or []) or any(attr(node, "output_padding") or [])
        if moves or attr(node, "output_shape") is not None:
            return False
        if min((k - 1) * d - p for k, d, p in zip(kernel * 2, dilations * 2, pads)) < 0:
            return False
    windows = math.prod(count_windows(node.outputs[0] if node.op_type == "Conv" else node.inputs[0], sizes))
    return windows >= _WINDOWS[node.op_type] and windows * math.prod(shape) >= _PRODUCTS


def _replace(model: ir.Model, nodes: Iterable[ir.Node], size: int) -> int:
    """Replace nodes of `_one_result_a_group` and `_many_windows`, but those whose channels fill no blocks of this size."""
    scope, count = Scope(free_prefix(model.graph, "blocked/"), lambda value: False), 0
    checked: list[ir.Value | None] = []
    for node in nodes:
        op = Emitter(scope)
        one_group = attr(node, "group", 1) == 1
        found = _dense(op, node, size) if one_group else _grouped(op, node, size)
        if found is not None:
            checked += node.inputs[:2]
            replace(scope, node, op.nodes, [found])
            count += 1
    forget(checked)
    if count:
        scope.register(model.graph)
        model.opset_imports[BLOCKED_DOMAIN] = 1
    return count


def _grouped(op: Emitter, node: ir.Node, size: int) -> ir.Value | None:
    x, w, *bias = node.inputs
    groups, each, *kernel = static_shape(w) or ()
    channels = groups * each
    if channels % size:
        return None
    laid = op.Transpose(op.Reshape(w, [channels // size, size, *kernel]), perm=[0, 2, 3, 1])
    weights = op.Reshape(laid, sizes_as_read(op, x, w, [channels, 1, *kernel], 0))
    found = _in_blocks(op, node, weights, [*bias], kernel, channels, group=channels)
    if each == 1:
        return found
    return op.ReduceSum(op.Reshape(found, [-1, groups, each, op.Shape(found, start=2)]), [2], keepdims=0)


def sizes_as_read(op: Emitter, x: ir.Value | None, w: ir.Value | None, sizes: Sequence[int], axis: int) -> ir.Value:
    """The shape of the weights in blocks, with as many channels at an axis as the images have: fewer would be filled up to whole blocks,
    without a word.
    """
    assert x is not None and w is not None
    row = op.i64(sizes) if is_certain(w) else row_if_declared(op, sizes, (w, 0, static_shape(w) or ()))
    return op.Concat(op.Slice(row, [0], [axis]), op.Shape(x, start=1, end=2), op.Slice(row, [axis + 1], [len(sizes)]), axis=0)


def _dense(op: Emitter, node: ir.Node, size: int) -> ir.Value | None:
    """The weights in blocks are (results / size, channels / size, kernel, channel of a block, result of a block).

    A Transpose of more than one axis takes onnxruntime several times as long as two of one each.
    """
    x, w, *bias = node.inputs
    first, second, *kernel = static_shape(w) or ()
    if first % size or second % size:
        return None
    positions, tiles = math.prod(kernel), first * second // size**2
    geometry: dict[str, Any] = {}
    if node.op_type == "Conv":
        results, channels = first, second
        laid = op.Transpose(op.Reshape(w, [first // size, size, second * positions]), perm=[0, 2, 1])
        laid = op.Transpose(op.Reshape(laid, [tiles, size, positions, size]), perm=[0, 2, 1, 3])
    else:
        results, channels = second, first
        laid = op.Gather(turned_weights(op, w, [first, second, *kernel], size), op.i64(range(positions)[::-1]), axis=1)
        dilations, pads = attr(node, "dilations") or [1, 1], attr(node, "pads") or [0] * 4
        geometry = {"pads": [(k - 1) * d - p for k, d, p in zip(kernel * 2, [*dilations] * 2, pads)]}
    weights = op.Reshape(laid, sizes_as_read(op, x, w, [results, channels, *kernel], 1))
    return _in_blocks(op, node, weights, [*bias], kernel, results, **geometry)


def turned_weights(op: Emitter, w: ir.Value | None, shape: Sequence[int], size: int) -> ir.Value:
    """The weights of a ConvTranspose, of this shape, as (blocks of results and of channels, kernel positions, channel and result of a block)."""
    channels, results, *kernel = shape
    tiles, positions = channels * results // size**2, math.prod(kernel)
    laid = op.Transpose(op.Reshape(w, [channels // size, size, results // size, size * positions]), perm=[2, 0, 1, 3])
    turned: ir.Value = op.Transpose(op.Reshape(laid, [tiles, size * size, positions]), perm=[0, 2, 1])
    return turned


def _in_blocks(
    op: Emitter, node: ir.Node, weights: ir.Value, bias: list[ir.Value | None], kernel: list[int], results: int, **geometry: Any
) -> ir.Value:
    """The Conv of that domain, of the node's images and geometry but what is said here, and its result as it was."""
    said: dict[str, Any] = {name: node.attributes[name] for name in ("pads", "strides", "dilations") if name in node.attributes}
    blocks = op.node("ReorderInput", [node.inputs[0]], domain=BLOCKED_DOMAIN)
    found = op.node("Conv", [blocks, weights, *bias], domain=BLOCKED_DOMAIN, kernel_shape=kernel, **said | geometry)
    return op.node("ReorderOutput", [found], domain=BLOCKED_DOMAIN, channels=results)
