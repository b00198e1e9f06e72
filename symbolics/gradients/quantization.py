"""Quantization with the straight-through estimator: rounding counts as the identity, saturation as a bound."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.gradients.registry import gradient
from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, static_shape

__all__: list[str] = []


def _along_axis(op: Builder, node: ir.Node, x: ir.Value, v: ir.Value | None) -> ir.Value | None:
    """A scale or zero point, shaped to broadcast with x."""
    if v is None:
        return None
    n = op.rank(node, x)
    if attr(node, "block_size", 0):
        return op.Gather(v, _blocks(op, node, x), axis=attr(node, "axis", 1) % n)
    rank = op.rank(node, v)
    if rank == 0 or static_shape(v) == (1,):
        return op.Reshape(v, op.constant([], ir.DataType.INT64)) if rank else v
    shape = [1] * n
    shape[attr(node, "axis", 1) % n] = -1
    return op.Reshape(v, shape)


def _blocks(op: Builder, node: ir.Node, x: ir.Value) -> ir.Value:
    """Which block each index along the axis belongs to."""
    return op.Div(op.indices(x, attr(node, "axis", 1) % op.rank(node, x)), op.i64(attr(node, "block_size")))


def _sum_over(op: Builder, node: ir.Node, g: ir.Value, x: ir.Value, scale: ir.Value) -> ir.Value:
    n = op.rank(node, x)
    axis = attr(node, "axis", 1) % n
    if attr(node, "block_size", 0):
        shape = [1] * n
        shape[axis] = -1
        blocks = op.Expand(op.Reshape(_blocks(op, node, x), shape), op.shape(x))
        zeros = op.Expand(op.number(0.0, g), op.shape(scale))
        return op.ScatterElements(zeros, blocks, g, axis=axis, reduction="add")
    if op.rank(node, scale) == 0 or static_shape(scale) == (1,):
        return op.reshape_like(op.ReduceSum(g, keepdims=0), scale)
    return op.ReduceSum(g, [i for i in range(n) if i != axis], keepdims=0)


@gradient("QuantizeLinear", straight_through=True)
def quantize_linear(op, node, g):
    x, scale, zero = [*node.inputs, None][:3]
    y = node.outputs[0]
    s = op.cast(_along_axis(op, node, x, scale), x.dtype)
    q = x / s
    if y.dtype is not None and y.dtype.is_integer():  # what was cut off has no gradient
        level = op.Round(q) if zero is None else op.Round(q) + op.Cast(_along_axis(op, node, x, zero), to=x.dtype)
        inside = op.And(op.GreaterOrEqual(level, float(y.dtype.min)), op.LessOrEqual(level, float(y.dtype.max)))
        g = op.Where(inside, g, 0.0)
    dx = g / s
    return [dx, _sum_over(op, node, -(dx * q), x, scale), None][: len(node.inputs)]


@gradient("DequantizeLinear")
def dequantize_linear(op, node, g):
    x, scale, zero = [*node.inputs, None][:3]
    s = op.cast(_along_axis(op, node, x, scale), g.dtype)
    level = op.Cast(x, to=g.dtype)
    if zero is not None:
        level = level - op.Cast(_along_axis(op, node, x, zero), to=g.dtype)
    return [g * s, _sum_over(op, node, g * level, x, scale), None][: len(node.inputs)]
