"""Reductions and cumulative sums. Reduced dims come back as 1 (``_keep``), then broadcasting does the rest."""

from __future__ import annotations

import math

from onnx_ir import Node, Value

from symbolics.gradients.registry import RuleFunction, formulas, gradient
from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, static_shape

__all__: list[str] = []


def _keep(op: Builder, v: Value, node: Node) -> Value:
    """v, shaped like the output of a reduction, with the reduced dims as 1."""
    x, axes, *_ = [*node.inputs, None]
    if attr(node, "keepdims") or axes is None or op.ints(axes) == []:
        return v  # without axes v is a scalar or nothing was reduced
    if op.ints(axes) is not None:
        return op.Unsqueeze(v, axes)
    # Some execution providers take no Unsqueeze whose axes are known at run time only.
    return op.reshape_like(v, op.ReduceSum(x, axes, keepdims=1, noop_with_empty_axes=attr(node, "noop_with_empty_axes")))


def _count(op: Builder, x: Value, y: Value, axes: Value | None, like: Value) -> float | Value:
    """How many elements of x go into one of y."""
    along = [] if x.shape is None else [x.shape[a] for a in op.ints(axes) or ()]
    known = [d for d in along if isinstance(d, int)]
    if along and len(known) == len(along):
        return float(math.prod(known))
    before, after = static_shape(x), static_shape(y)
    if before is not None and after is not None:
        return float(math.prod(before) / max(math.prod(after), 1))
    return op.as_count(op.Div(op.Size(x), op.Max(op.Size(y), op.i64(1))), like)  # of nothing, no division by zero


def _norm(op: Builder, y: Value) -> Value:
    """|x|, and infinity at the origin: x / |x| is 0 there, as torch.linalg.vector_norm says."""
    return op.Where(op.Equal(y, 0.0), op.number(math.inf, y), y)


_LINES: dict[str, RuleFunction] = {
    "ReduceSum": lambda op, g, x, *, node: op.expand_like(_keep(op, g, node), x),
    "ReduceMean": lambda op, g, x, axes, *, y, node: op.expand_like(_keep(op, op.shared(g, _count(op, x, y, axes, g)), node), x),
    "ReduceL1": lambda op, g, x, *, node: _keep(op, g, node) * op.Sign(x),
    "ReduceL2": lambda op, g, x, *, y, node: x * (_keep(op, g, node) / _norm(op, _keep(op, y, node))),
    "ReduceLogSum": lambda op, g, x, *, y, node: op.expand_like(_keep(op, g / op.Exp(y), node), x),
    "ReduceLogSumExp": lambda op, g, x, *, y, node: _keep(op, g, node) * op.Exp(x - _keep(op, y, node)),
    "ReduceSumSquare": lambda op, g, x, *, node: _keep(op, 2.0 * g, node) * x,
    "CumSum": lambda op, g, x, axis, *, exclusive, reverse: op.CumSum(g, axis, exclusive=exclusive, reverse=1 - reverse),
}
formulas(_LINES)


@gradient("ReduceMax", "ReduceMin")
def reduce_max_min(op: Builder, g: Value, x: Value, axes: Value | None, *, y: Value, node: Node, noop_with_empty_axes: int) -> Value:
    """Ties share evenly, as torch.amax and torch.amin do."""
    mask = op.mask(op.Equal(x, _keep(op, y, node)), g)
    return mask * (_keep(op, g, node) / op.ReduceSum(mask, axes, keepdims=1, noop_with_empty_axes=noop_with_empty_axes))


@gradient("ReduceProd")
def reduce_prod(op: Builder, g: Value, x: Value, axes: Value | None, *, y: Value, node: Node, noop_with_empty_axes: int) -> Value:
    """The product of the others: y / x, and where x is the only zero, the product without it."""
    same = {"keepdims": 1, "noop_with_empty_axes": noop_with_empty_axes}
    y, g = _keep(op, y, node), _keep(op, g, node)
    zero = op.Equal(x, 0.0)
    filled = op.Where(zero, op.number(1.0, x), x)
    single = op.Equal(op.ReduceSum(op.mask(zero, g), axes, **same), 1.0)
    without = op.Where(single, op.ReduceProd(filled, axes, **same), 0.0)
    return g * op.Where(zero, without, y / filled)


@gradient("CumProd")
def cum_prod(op: Builder, g: Value, x: Value, axis: Value, *, y: Value, exclusive: int, reverse: int) -> Value:
    """The sum of what follows, g * y, over x.

    Where x is the first zero on its way, the products over the others count instead: those that have no zero but this one.
    """
    zero = op.Equal(x, 0.0)
    filled = op.Where(zero, op.number(1.0, x), x)
    zeros = op.mask(zero, g)
    so_far = op.CumSum(zeros, axis, reverse=reverse)
    before = op.CumSum(zeros, axis, reverse=reverse, exclusive=1) if exclusive else so_far
    others = op.CumProd(filled, axis, exclusive=exclusive, reverse=reverse)

    def follow(v: Value) -> Value:
        return op.CumSum(v, axis, exclusive=exclusive, reverse=1 - reverse)

    at_zero = op.Where(op.Equal(so_far, 1.0), follow(g * others * op.mask(op.Equal(before, 1.0), g)), 0.0)
    return op.Where(zero, at_zero, follow(g * y) / filled)
