"""Softmax, normalizations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from symbolics.gradients.compositions import is_masked_softmax
from symbolics.gradients.registry import Grads, gradient
from symbolics.gradients.residuals import residual
from symbolics.graph.builder import Builder
from symbolics.graph.values import HALVES, dtype_of, static_shape, unsupported

__all__ = ["normalized", "statistics", "through_softmax", "without_nan"]


@gradient("Softmax")
def softmax(op: Builder, g: Value, x: Value, *, y: Value, axis: int) -> Value:
    """y * (g - sum(g * y)). A fully masked row is NaN; where the model replaces it, its gradient is 0, as in torch's attention."""
    return through_softmax(op, g, without_nan(op, y), axis)


def through_softmax(op: Builder, g: Value, y: Value, axis: int) -> Value:
    """The Jacobian of Softmax, which is symmetric, times a gradient or a tangent; y without NaN."""
    if y.dtype in HALVES:  # the difference cancels: torch takes it in float32 too
        y, g = op.Cast(y, to=ir.DataType.FLOAT), op.Cast(g, to=ir.DataType.FLOAT)
    return y * (g - op.ReduceSum(g * y, [axis], keepdims=1))


def without_nan(op: Builder, y: Value) -> Value:
    """y with 0 for NaN, where the model itself replaces elements of y; its own replacement where it says just that."""
    for user in y.consumers():
        if user.op_type == "Where" and user.inputs[2] is y and is_masked_softmax(op, user.inputs[0], user.inputs[1], y):
            return user.outputs[0]
    return op.Where(op.IsNaN(y), 0.0, y) if _is_guarded(y) else y


def _is_guarded(y: Value) -> bool:
    return any(u.op_type in ("IsNaN", "Where") or (u.op_type in ("Cast", "CastLike") and _is_guarded(u.outputs[0])) for u in y.consumers())


@gradient("LogSoftmax")
def log_softmax(op: Builder, g: Value, x: Value, *, y: Value, axis: int) -> Value:
    return g - op.Exp(y) * op.ReduceSum(g, [axis], keepdims=1)


def normalized(op: Builder, g: Value, normal: Value, inverse: Value, axes: list[int]) -> Value:
    """The gradient through (x - mean) / deviation: what is left of g without its mean and its part along the result."""
    centered = g - op.ReduceMean(g, axes, keepdims=1)
    return (centered - normal * op.ReduceMean(g * normal, axes, keepdims=1)) * inverse


@gradient("LayerNormalization")
def layer_normalization(
    op: Builder, gs: Sequence[Value | None], x: Value, scale: Value, bias: Value | None, *,
    y: Value, node: ir.Node, axis: int, epsilon: float, stash_type: int,
) -> Grads:  # fmt: skip
    g, gmean, ginverse = [*gs, None, None][:3]
    rank = op.rank(node, x)
    axis %= rank
    axes = list(range(axis, rank))
    stash = ir.DataType(stash_type)
    settings = {"epsilon": epsilon, "stash_type": stash_type}
    kind = x.dtype
    plain = static_shape(x) if kind is stash is ir.DataType.FLOAT else None  # the dims of an x that the operator takes as it is
    if plain and g is not None and gmean is ginverse is None and axis == rank - 1 and static_shape(scale) == plain[axis:]:
        if rank > 2 and (matrix := op.matrix_of(g)) is not None and (static_shape(matrix) or ())[-1:] == plain[-1:]:
            return _rows_of_layer_normalization(op, x, plain[-1], scale, bias, matrix, settings)
    stash, mean, inverse = statistics(op, node, x, axis, epsilon, stash)
    if plain is not None:  # one node for two
        normal = op.LayerNormalization(x, op.ones(plain[axis:], dtype_of(x)), axis=axis, **settings)
    else:
        normal = (op.Cast(x, to=stash) - mean) * inverse
    g = op.zeros_like(y) if g is None else op.Cast(g, to=stash)
    dx = normalized(op, g * op.Cast(scale, to=stash), normal, inverse, axes)
    if gmean is not None:
        dx = dx + gmean / op.count_over(x, axes, gmean)
    if ginverse is not None:
        dx = dx - ginverse * (inverse * inverse) * normal / op.count_over(x, axes, ginverse)
    dx = op.Cast(dx, to=kind)
    dscale = _sum_leading(op, g * normal, scale, x)
    return [dx, dscale, None if bias is None else _sum_leading(op, g, bias, x)]


def statistics(op: Builder, node: ir.Node, x: Value, axis: int, epsilon: float, stash: ir.DataType) -> tuple[ir.DataType, Value, Value]:
    """The type that a LayerNormalization computes in, and mean and inverse deviation of its input: outputs of the node."""
    rank = op.rank(node, x)
    axis %= rank
    if x.dtype is ir.DataType.DOUBLE:  # the operator's own statistics may be of a narrower type
        axes = list(range(axis, rank))
        mean = op.ReduceMean(x, axes, keepdims=1)
        return x.dtype, mean, 1.0 / op.Sqrt(op.ReduceMean((x - mean) * (x - mean), axes, keepdims=1) + epsilon)
    shape = ir.Shape([*(x.shape or ())[:axis], *[1] * (rank - axis)])
    mean, inverse = (residual(op, node, i, stem, stash, shape) for i, stem in ((1, "mean"), (2, "inverse")))
    return stash, mean, inverse


def _rows_of_layer_normalization(
    op: Builder, x: Value, width: int, scale: Value, bias: Value | None, g: Value, settings: dict[str, Any]
) -> Grads:
    """The same where g came as a matrix, as from the Gemm behind: all is done with matrices, for the Gemm before."""
    ones = op.ones([width], dtype_of(x))
    normal, _, inverse = op.node("LayerNormalization", [op.rows(x, width), ones], outputs=3, **settings)
    inverse.type = x.type
    dx = normalized(op, g * scale, normal, inverse, [1])
    dx.shape = g.shape
    dbias = None if bias is None else op.ReduceSum(g, [0], keepdims=0)
    return [op.reshape_like(dx, x), op.ReduceSum(g * normal, [0], keepdims=0), dbias]


def _sum_leading(op: Builder, g: Value, like: Value, x: Value) -> Value:
    if like.shape is not None and x.shape is not None and (lead := len(x.shape) - len(like.shape)):
        if all((type(d) is int and d != 1) or d == e for d, e in zip(like.shape, x.shape[lead:])):
            return op.ReduceSum(g, list(range(lead)), keepdims=0)
    return op.sum_to(g, like, x)


def _channels(op: Builder, v: Value, rank: int) -> Value:
    """A vector over channels, shaped to broadcast with (N, C, ...)."""
    return op.memo(("channels", v, rank), lambda: op.Reshape(v, [-1, *[1] * (rank - 2)])) if rank > 2 else v


@gradient("BatchNormalization")
def batch_normalization(
    op: Builder, gs: Sequence[Value | None], x: Value, scale: Value, bias: Value, mean: Value, variance: Value, *,
    ys: Sequence[Value], node: ir.Node, epsilon: float, momentum: float, training_mode: int,
) -> Grads:  # fmt: skip
    g, gmean, gspread = [*gs, None, None][:3]
    # The batch's own statistics, which a gradient of this node reads. Running ones are no function to train.
    own = training_mode and momentum == 0 and len(ys) == 3 and all(o.name for o in ys)
    if not own:
        gmean = gspread = None
    if g is gmean is gspread is None:
        return {}
    rank = op.rank(node, x)
    if rank == 1:
        raise unsupported(node, "an input of rank 1 has no channels")
    axes = [0, *range(2, rank)]
    kind = ir.DataType.FLOAT if mean.dtype in HALVES else mean.dtype  # statistics may be of a wider type
    wide_x = op.Cast(x, to=kind)
    if own and g is None:
        return [_through_statistics(op, x, wide_x - _channels(op, ys[1], rank), gmean, gspread, rank), None, None, None, None]
    assert g is not None
    wide = op.Cast(g, to=kind)
    if training_mode:
        if own:
            mean_x, spread = (op.Cast(own_one, to=kind) for own_one in ys[1:])
            centered = wide_x - _channels(op, mean_x, rank)
        else:
            mean_x = op.ReduceMean(wide_x, axes, keepdims=0)
            centered = wide_x - _channels(op, mean_x, rank)
            spread = op.ReduceMean(centered * centered, axes, keepdims=0)
        inverse = 1.0 / op.Sqrt(spread + epsilon)
        dbias = op.ReduceSum(wide, axes, keepdims=0)
        dscale = op.ReduceSum(wide * centered, axes, keepdims=0) * inverse
        factor = inverse * op.Cast(scale, to=kind)
        share = factor / op.count_over(x, axes, dbias)
        # Few passes over what is large: a BatchNormalization takes dscale * normal + dbias from wide_x in one.
        rest = op.BatchNormalization(wide_x, share * dscale, share * dbias, mean_x, spread, epsilon=epsilon)
        dx = wide * _channels(op, factor, rank) - rest
        if gmean is not None or gspread is not None:
            dx = dx + _through_statistics(op, x, centered, gmean, gspread, rank)
        return [dx, dscale, dbias, None, None]
    mean, variance = op.Cast(mean, to=kind), op.Cast(variance, to=kind)
    inverse = 1.0 / op.Sqrt(variance + epsilon)
    factor = op.Cast(scale, to=kind) * inverse
    normal = (wide_x - _channels(op, mean, rank)) * _channels(op, inverse, rank)
    dbias, dscale = op.ReduceSum(wide, axes, keepdims=0), op.ReduceSum(wide * normal, axes, keepdims=0)
    dvariance = dscale * (factor * inverse) * -0.5
    return [wide * _channels(op, factor, rank), dscale, dbias, -(dbias * factor), dvariance]


def _through_statistics(op: Builder, x: Value, centered: Value, gmean: Value | None, gspread: Value | None, rank: int) -> Value:
    """The gradient by x of its mean and of its biased variance over all axes but the channels'."""
    axes, parts = [0, *range(2, rank)], list[Value]()
    if gspread is not None:
        parts.append(centered * _channels(op, 2.0 * gspread / op.count_over(x, axes, gspread), rank))
    if gmean is not None:
        share = _channels(op, gmean / op.count_over(x, axes, gmean), rank)
        parts.append(share if parts else op.expand_like(share, centered))
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


@gradient("InstanceNormalization")
def instance_normalization(op: Builder, g: Value, x: Value, scale: Value, bias: Value, *, node: ir.Node, epsilon: float) -> Grads:
    rank = op.rank(node, x)
    axes = list(range(2, rank))
    if x.dtype in HALVES:  # squares may be no numbers of it
        g, x, scale = (op.Cast(value, to=ir.DataType.FLOAT) for value in (g, x, scale))
    centered = x - op.ReduceMean(x, axes, keepdims=1)
    inverse = 1.0 / op.Sqrt(op.ReduceMean(centered * centered, axes, keepdims=1) + epsilon)
    normal = centered * inverse
    dx = normalized(op, g * _channels(op, scale, rank), normal, inverse, axes)
    return [dx, op.ReduceSum(g * normal, [0, *axes], keepdims=0), op.ReduceSum(g, [0, *axes], keepdims=0)]


@gradient("LpNormalization")
def lp_normalization(op: Builder, g: Value, x: Value, *, y: Value, axis: int, p: int) -> Value:
    """x / norm; the gradient of the norm itself as in ReduceL1 and ReduceL2."""
    norm = (op.ReduceL1 if p == 1 else op.ReduceL2)(x, [axis], keepdims=1)
    safe = op.Where(op.Equal(norm, 0.0), op.number(float("inf"), norm), norm)
    direction = op.Sign(x) if p == 1 else y
    return (g - direction * op.ReduceSum(g * y, [axis], keepdims=1)) / safe
