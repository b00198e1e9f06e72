"""Quantization with the straight-through estimator: rounding counts as the identity, saturation as a bound."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import Value

from symbolics.gradients.registry import Grads, gradient
from symbolics.graph.builder import Builder
from symbolics.graph.values import static_shape

__all__: list[str] = []


class _Scales:
    """How the scales and zero points of a node lie over x: one for all, one per index of the axis, or one per block of it."""

    def __init__(self, op: Builder, node: ir.Node, x: Value, scale: Value, axis: int, block_size: int | None) -> None:
        self.op, self.x, self.scale, self.n = op, x, scale, op.rank(node, x)
        self.axis, self.block_size = axis % self.n, block_size
        self.rank = op.rank(node, scale)
        self.is_single = self.rank == 0 or static_shape(scale) == (1,)
        self.along = [-1 if i == self.axis else 1 for i in range(self.n)]

    def blocks(self) -> Value:
        """Which block each index along the axis belongs to."""
        return self.op.Div(self.op.indices(self.x, self.axis), self.op.i64(self.block_size))

    def spread(self, v: Value) -> Value:
        """A scale or zero point, shaped to broadcast with x."""
        if self.block_size:
            return self.op.Gather(v, self.blocks(), axis=self.axis)
        if self.is_single:
            return self.op.Reshape(v, self.op.constant([], ir.DataType.INT64)) if self.rank else v
        return self.op.Reshape(v, self.along)

    def gather(self, g: Value) -> Value:
        """The adjoint of `spread`."""
        op = self.op
        if self.block_size:
            blocks = op.Expand(op.Reshape(self.blocks(), self.along), op.Shape(self.x))
            zeros = op.Expand(op.number(0.0, g), op.Shape(self.scale))
            return op.ScatterElements(zeros, blocks, g, axis=self.axis, reduction="add")
        if self.is_single:
            return op.reshape_like(op.ReduceSum(g, keepdims=0), self.scale)
        return op.ReduceSum(g, [i for i in range(self.n) if i != self.axis], keepdims=0)


@gradient("QuantizeLinear", straight_through=True)
def quantize_linear(
    op: Builder, g: Value, x: Value, scale: Value, zero: Value | None, *, y: Value, node: ir.Node, axis: int, block_size: int | None
) -> Grads:
    """round(x / s) + z, without the gradient of what was cut off."""
    scales = _Scales(op, node, x, scale, axis, block_size)
    s = op.Cast(scales.spread(scale), to=x.dtype)
    q = x / s
    if y.dtype is not None and y.dtype.is_integer():
        level = op.Round(q) if zero is None else op.Round(q) + op.Cast(scales.spread(zero), to=x.dtype)
        inside = op.And(op.GreaterOrEqual(level, float(y.dtype.min)), op.LessOrEqual(level, float(y.dtype.max)))
        g = op.Where(inside, g, 0.0)
    dx = op.Cast(g, to=x.dtype) / s
    return [dx, scales.gather(-(dx * q)), None]  # a zero point of float8 is a float, too


@gradient("DequantizeLinear")
def dequantize_linear(
    op: Builder, g: Value, x: Value, scale: Value, zero: Value | None, *, node: ir.Node, axis: int, block_size: int | None
) -> Grads:
    """(x - z) s."""
    scales = _Scales(op, node, x, scale, axis, block_size)
    s = op.Cast(scales.spread(scale), to=g.dtype)
    level = op.Cast(x, to=g.dtype)
    if zero is not None:
        level = level - op.Cast(scales.spread(zero), to=g.dtype)
    return [g * s, scales.gather(g * level), None]
