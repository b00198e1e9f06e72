"""Reductions and cumulative sums. Reduced dims come back as 1 (``_keep``), then broadcasting does the rest."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from symbolics.gradients.registry import gradient
from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, static_shape

__all__: list[str] = []


def _axes(node: ir.Node) -> ir.Value | None:
    return node.inputs[1] if len(node.inputs) > 1 else None


def _is_identity(op: Builder, node: ir.Node) -> bool:
    """No axes and noop_with_empty_axes: the reduction of each element alone."""
    axes = op.ints(_axes(node)) if _axes(node) is not None else []
    return axes == [] and bool(attr(node, "noop_with_empty_axes", 0))


def _keep(op: Builder, node: ir.Node, v: ir.Value) -> ir.Value:
    """v, shaped like the output, with the reduced dims as 1."""
    axes = _axes(node)
    if attr(node, "keepdims", 1) or axes is None or op.ints(axes) == []:
        return v  # without axes v is a scalar or nothing was reduced
    return op.Unsqueeze(v, axes)


def _reduce(op: Builder, node: ir.Node, kind: str, v: ir.Value) -> ir.Value:
    """The same reduction of another value, reduced dims kept."""
    return getattr(op, kind)(v, _axes(node), keepdims=1, noop_with_empty_axes=attr(node, "noop_with_empty_axes", 0))


def _count(op: Builder, node: ir.Node, g: ir.Value) -> float | ir.Value:
    """How many elements of x go into one of y."""
    x, y, axes = node.inputs[0], node.outputs[0], op.ints(_axes(node))
    if axes and x.shape is not None and all(type(x.shape[a]) is int for a in axes):
        return float(np.prod([x.shape[a] for a in axes]))
    if static_shape(x) is not None and static_shape(y) is not None:
        return float(np.prod(static_shape(x)) / max(np.prod(static_shape(y)), 1))
    return op.cast(op.Div(op.Size(x), op.Size(y)), g.dtype)


@gradient("ReduceSum")
def reduce_sum(op, node, g):
    return [op.expand_like(_keep(op, node, g), node.inputs[0])]


@gradient("ReduceMean")
def reduce_mean(op, node, g):
    return [op.expand_like(_keep(op, node, g / _count(op, node, g)), node.inputs[0])]


@gradient("ReduceMax", "ReduceMin")
def reduce_max_min(op, node, g):
    """Ties share evenly, as torch.amax and torch.amin do."""
    mask = op.mask(op.Equal(node.inputs[0], _keep(op, node, node.outputs[0])), g)
    return [mask * (_keep(op, node, g) / _reduce(op, node, "ReduceSum", mask))]


@gradient("ReduceProd")
def reduce_prod(op, node, g):
    """The product of the others: y / x, and where x is the only zero, the product without it."""
    x, y, g = node.inputs[0], _keep(op, node, node.outputs[0]), _keep(op, node, g)
    zero = op.Equal(x, 0.0)
    filled = op.Where(zero, op.number(1.0, x), x)
    single = op.Equal(_reduce(op, node, "ReduceSum", op.mask(zero, g)), 1.0)
    without = op.Where(single, _reduce(op, node, "ReduceProd", filled), 0.0)
    return [g * op.Where(zero, without, y / filled)]


@gradient("ReduceL1")
def reduce_l1(op, node, g):
    return [_keep(op, node, g) * op.Sign(node.inputs[0])]


@gradient("ReduceL2")
def reduce_l2(op, node, g):
    """x / |x|, and 0 at the origin, as torch.linalg.vector_norm says."""
    y = _keep(op, node, node.outputs[0])
    return [node.inputs[0] * (_keep(op, node, g) / op.Where(op.Equal(y, 0.0), op.number(np.inf, y), y))]


@gradient("ReduceLogSum")
def reduce_log_sum(op, node, g):
    return [op.expand_like(_keep(op, node, g / op.Exp(node.outputs[0])), node.inputs[0])]


@gradient("ReduceLogSumExp")
def reduce_log_sum_exp(op, node, g):
    return [_keep(op, node, g) * op.Exp(node.inputs[0] - _keep(op, node, node.outputs[0]))]


@gradient("ReduceSumSquare")
def reduce_sum_square(op, node, g):
    return [_keep(op, node, 2.0 * g) * node.inputs[0]]


@gradient("CumSum")
def cum_sum(op, node, g):
    return [op.CumSum(g, node.inputs[1], exclusive=attr(node, "exclusive", 0), reverse=1 - attr(node, "reverse", 0))]


@gradient("CumProd")
def cum_prod(op, node, g):
    """The sum of what follows, g * y, over x.

    Where x is the first zero on its way, the products over the others count instead: those that have no zero but this one.
    """
    x, axis = node.inputs
    exclusive, reverse = attr(node, "exclusive", 0), attr(node, "reverse", 0)
    zero = op.Equal(x, 0.0)
    filled = op.Where(zero, op.number(1.0, x), x)
    zeros = op.mask(zero, g)
    so_far = op.CumSum(zeros, axis, reverse=reverse)
    before = op.CumSum(zeros, axis, reverse=reverse, exclusive=1) if exclusive else so_far
    others = op.CumProd(filled, axis, exclusive=exclusive, reverse=reverse)

    def follow(v: ir.Value) -> ir.Value:
        return op.CumSum(v, axis, exclusive=exclusive, reverse=1 - reverse)

    at_zero = op.Where(op.Equal(so_far, 1.0), follow(g * others * op.mask(op.Equal(before, 1.0), g)), 0.0)
    return [op.Where(zero, at_zero, follow(g * node.outputs[0]) / filled)]
