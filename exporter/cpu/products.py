"""Convolutions of few windows as one product for all images.

onnxruntime multiplies an image at a time, and reads all weights for each: 1.7 ms for eight images of 512 channels on 2x2 and 3x3 weights,
of which one product takes half. In memory, where weights are no constants, which its optimizer packs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from exporter.cpu.blocked import count_windows, weights_of_images
from exporter.cpu.declared import forget, is_certain, row_if_declared
from symbolics.gradients.convolution import columns
from symbolics.gradients.windows import windows as geometry
from symbolics.graph.builder import Builder
from symbolics.graph.copies import replace
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import attr, static_shape

__all__ = ["multiply_few_windows"]

_MOST, _LEAST = 16, 16  # windows of an image, and of all
_WEIGHTS = 2**18


def multiply_few_windows(model: ir.Model, sizes: Mapping[str, int] | None = None) -> int:
    """Replace what is written above in a model for onnxruntime's CPU, where the shapes are known.

    Args:
        model: Changed.
        sizes: As `block_channels` has it.

    Returns:
        How many nodes were replaced.
    """
    nodes = [node for node in model.graph if node.op_type == "Conv" and node.domain == "" and _fits(node, sizes or {})]
    if not nodes:
        return 0
    scope = Scope(free_prefix(model.graph, "products/"), lambda value: False)
    checked = [value for node in nodes for value in node.inputs[:2]]
    for node in nodes:
        op = Builder(scope)
        replace(scope, node, op.nodes, [_product(op, node)])
    forget(checked)
    scope.register(model.graph)
    return len(nodes)


def _fits(node: ir.Node, sizes: Mapping[str, int]) -> bool:
    weights = weights_of_images(node)
    if not weights or attr(node, "group", 1) != 1 or not count_windows(node.inputs[0], sizes)[1]:
        return False
    kernel, pads = weights[2:], attr(node, "pads") or [0] * 4
    images, windows = count_windows(node.outputs[0], sizes)
    few = 0 < windows <= _MOST and images * windows >= _LEAST
    if not few or math.prod(weights) < _WEIGHTS or math.prod(kernel) == 1:
        return False
    for axis in range(2):
        stride, dilation = ((attr(node, name) or [1, 1])[axis] for name in ("strides", "dilations"))
        size, found = ((value.shape or ())[2 + axis] for value in (node.inputs[0], node.outputs[0]) if value is not None)
        reach = size + pads[axis] + pads[2 + axis] - (kernel[axis] - 1) * dilation - 1
        # The file's word, which may be wrong; and of an image of which nothing is seen there is nothing to lay out.
        if found != reach // stride + 1 or reach % stride >= size + pads[2 + axis]:
            return False
    return True


def _product(op: Builder, node: ir.Node) -> ir.Value:
    x, w, *more = node.inputs
    assert x is not None and w is not None
    results, channels, *kernel = static_shape(w) or ()
    _, windows = count_windows(node.outputs[0], {})
    images, result = ([size for size in (value.shape or ())[2:] if isinstance(size, int)] for value in (x, node.outputs[0]))
    slide = geometry(op, node, x, node.outputs[0], kernel)
    bias = [op.Unsqueeze(value, [1]) for value in more if value is not None]
    checks = [(x, 1, [channels, *images]), *([] if is_certain(w) else [(w, 0, [results, channels, *kernel])])]
    weights = op.Reshape(w, row_if_declared(op, [results, channels * math.prod(kernel)], *checks))
    product = op.Gemm(weights, columns(op, slide, x, channels), *bias, transB=1)
    return op.Reshape(op.Transpose(op.Reshape(product, [results, -1, windows]), perm=[1, 0, 2]), [-1, results, *result])
