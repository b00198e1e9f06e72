"""Convolutions of one result a group, by the kernels that onnxruntime has for channels in blocks.

onnxruntime lays out what each window of such a Conv reads and multiplies one row with it: 4 ms for 96 channels of 16x16 pixels, eight
images and 7x7 weights, where torch takes 0.4. Its kernels for channels in blocks (domain com.microsoft.nchwc) take 0.7, and its
optimizer calls them where weights are constants. In a training step and in a loaded module they are inputs, so the graph says it here, in
memory: the images and the weights in blocks, the Conv of that domain, and its result as it was. Where all channels are one group, it is
seldom worth the turning.

The gradient of a depthwise Conv for its weights is a Conv with one group a channel, each of which reads all images. It is one Conv of as
many channels as there are channels and images together, and a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import attr, static_shape

__all__ = ["block_channels", "block_size"]

_DOMAIN = "com.microsoft.nchwc"
_SIZES = (16, 8)  # with AVX-512 and without
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


def block_channels(model: ir.Model) -> int:
    """Replace what is written above in a model for onnxruntime's CPU, where the shapes are known.

    Args:
        model: Changed.

    Returns:
        How many nodes were replaced.
    """
    nodes = [node for node in model.graph if node.op_type == "Conv" and node.domain == "" and _fits(node)]
    return _replace(model, nodes, size) if nodes and (size := block_size()) else 0


def _fits(node: ir.Node) -> bool:
    """Whether a Conv of images has one result a group, and weights that are no constant."""
    x, w, *bias = node.inputs
    shape, group = static_shape(w), attr(node, "group", 1)
    if x is None or w is None or shape is None or len(shape) != 4 or x.dtype is not ir.DataType.FLOAT or w.const_value is not None:
        return False
    if attr(node, "auto_pad", "NOTSET") != "NOTSET" or min(attr(node, "pads") or [0]) < 0:
        return False
    return 1 < group == shape[0] and (shape[1] == 1 or not any(bias))


def _replace(model: ir.Model, nodes: Iterable[ir.Node], size: int) -> int:
    """Replace nodes that `_fits`, but those whose channels fill no blocks of this size."""
    scope, count = Scope(free_prefix(model.graph, "blocked/"), lambda value: False), 0
    for node in nodes:
        x, w, *bias = node.inputs
        groups, each, *kernel = static_shape(w) or ()
        channels = groups * each
        if channels % size:
            continue
        op = Emitter(scope)
        laid = op.Transpose(op.Reshape(w, [channels // size, size, *kernel]), perm=[0, 2, 3, 1])
        # As many as the images have now: fewer would be filled up to whole blocks, without a word.
        weights = op.Reshape(laid, [op.Shape(x, start=1, end=2), 1, *kernel])
        blocks = op.node("ReorderInput", [x], domain=_DOMAIN)
        geometry: dict[str, Any] = {name: node.attributes[name] for name in ("pads", "strides", "dilations") if name in node.attributes}
        found = op.node("Conv", [blocks, weights, *bias], domain=_DOMAIN, group=channels, kernel_shape=kernel, **geometry)
        found = op.node("ReorderOutput", [found], domain=_DOMAIN, channels=channels)
        if each > 1:
            found = op.ReduceSum(op.Reshape(found, [-1, groups, each, op.Shape(found, start=2)]), [2], keepdims=0)
        replace(scope, node, op.nodes, [found])
        count += 1
    if count:
        scope.register(model.graph)
        model.opset_imports[_DOMAIN] = 1
    return count
