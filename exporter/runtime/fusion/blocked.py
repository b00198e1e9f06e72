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
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from symbolics.graph.values import attr, name_of, static_shape

__all__ = ["block_channels", "block_size"]

_DOMAIN = "com.microsoft.nchwc"
_SIZES = (16, 8)  # with AVX-512 and without


@functools.cache
def block_size() -> int:
    """How many channels a block has for onnxruntime on this processor, found by trying; 0 where it has no such kernels."""
    import onnxruntime

    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((1, 16, 1, 2), (16, 1, 1, 2)))
    expected = (x * w.reshape(1, 16, 1, 2)).sum(-1)
    for size in _SIZES:
        graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="blocks")
        values = [ir.val(name, ir.DataType.FLOAT, array.shape) for name, array in (("x", x), ("w", w))]
        graph.inputs.extend(values)
        node = ir.node("Conv", values, {"group": 16, "kernel_shape": [1, 2]}, outputs=[ir.val("y", ir.DataType.FLOAT, (1, 16, 1, 1))])
        graph.append(node)
        graph.outputs.append(node.outputs[0])
        model = ir.Model(graph, ir_version=9)
        _Blocks(graph, size).replace(node)
        model.opset_imports[_DOMAIN] = 1
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        try:
            session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
            (found,) = session.run(None, {"x": x, "w": w})
        except Exception:  # onnxruntime has errors of many classes for what it does not know
            continue
        if np.allclose(found[..., 0], expected, atol=1e-5):
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
    if not nodes or not (size := block_size()):
        return 0
    blocks = _Blocks(model.graph, size)
    count = sum(blocks.replace(node) for node in nodes)
    if count:
        model.opset_imports[_DOMAIN] = 1
    return count


def _fits(node: ir.Node) -> bool:
    """Whether a Conv of images has one result a group, and weights that are no constant."""
    x, w, *bias = node.inputs
    shape, group = static_shape(w), attr(node, "group", 1)
    if x is None or w is None or shape is None or len(shape) != 4 or x.dtype is not ir.DataType.FLOAT or w.const_value is not None:
        return False
    if attr(node, "auto_pad", "NOTSET") != "NOTSET" or min(attr(node, "pads") or [0]) < 0:
        return False
    return 1 < group == shape[0] and (shape[1] == 1 or not any(bias))


class _Blocks:
    """What writes into one graph."""

    def __init__(self, graph: ir.Graph, size: int) -> None:
        self.graph = graph
        self.size = size
        taken = {value.name for node in graph for value in node.outputs} | set(graph.initializers)
        self._names = (name for number in itertools.count() if (name := f"blocked/{number}") not in taken)

    def replace(self, node: ir.Node) -> bool:
        """Replace a node that `_fits`; False where its channels fill no blocks."""
        x, w, *bias = node.inputs
        assert x is not None and w is not None
        groups, each, *kernel = static_shape(w) or ()
        channels, size, y = groups * each, self.size, node.outputs[0]
        if channels % size:
            return False
        new: list[ir.Node] = []

        def add(
            operator: str, inputs: Sequence[ir.Value | None], domain: str = "", kind: ir.DataType = ir.DataType.FLOAT, **attributes: Any
        ) -> ir.Value:
            made = ir.node(operator, inputs, attributes, domain=domain, outputs=[ir.val(next(self._names), kind)])
            made.name = name_of(made.outputs[0])
            new.append(made)
            return made.outputs[0]

        kept = {a.name: a.value for a in node.attributes.values() if a.name in ("pads", "strides", "dilations")}
        laid = add("Transpose", [add("Reshape", [w, self._sizes([channels // size, size, *kernel])])], perm=[0, 2, 3, 1])
        weights = add("Reshape", [laid, self._sizes([channels, 1, *kernel])])
        blocks = add("ReorderInput", [x], _DOMAIN)
        found = add("Conv", [blocks, weights, *bias], _DOMAIN, group=channels, kernel_shape=kernel, **kept)
        found = add("ReorderOutput", [found], _DOMAIN, channels=channels)
        if each > 1:
            images = add("Shape", [found], kind=ir.DataType.INT64, start=2)
            sizes = add("Concat", [self._sizes([-1, groups, each]), images], kind=ir.DataType.INT64, axis=0)
            apart = add("Reshape", [found, sizes])
            found = add("ReduceSum", [apart, self._sizes([2])], keepdims=0)
        found.shape = y.shape
        self.graph.insert_before(node, new)
        ir.convenience.replace_all_uses_with(y, found, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)
        found.name, y.name = y.name, found.name
        return True

    def _sizes(self, sizes: Sequence[int]) -> ir.Value:
        value = ir.val(next(self._names), const_value=ir.tensor(list(sizes), ir.DataType.INT64))
        self.graph.register_initializer(value)
        return value
