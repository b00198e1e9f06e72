"""Closed forms for what exporters write in several nodes: attention, the tanh form of GELU.

A rule asks here first; the answer maps the values that the whole reads to their gradients, and says nothing about those
in between. None where the pattern does not match: then the rules of the parts apply. Values in between may have other uses:
gradients on those ways come from the parts.
"""

from __future__ import annotations

import onnx_ir as ir

from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, rank_of, static_shape

__all__ = ["attention", "is_masked_softmax", "swap", "tanh_gelu"]


def swap(op: Builder, x: ir.Value, rank: int) -> ir.Value:
    """The transpose of the last two axes; what x is the transpose of, where it is one.

    Any other Transpose before it stays apart: runtimes fuse a swap of the last two axes into the product that reads it.
    """
    perm = [*range(rank - 2), rank - 1, rank - 2]
    maker = x.producer()
    if maker is not None and maker.op_type == "Transpose" and list(attr(maker, "perm") or ()) == perm:
        return maker.inputs[0]
    return op.memo(("swap", x), lambda: op.Transpose(x, perm=perm))


def is_masked_softmax(op: Builder, condition: ir.Value, x: ir.Value, y: ir.Value) -> bool:
    """Whether ``Where(condition, x, y)`` is a softmax with 0 for the NaN of its fully masked rows."""
    maker, test = y.producer(), condition.producer()
    if maker is None or maker.op_type != "Softmax" or test is None or test.op_type != "IsNaN" or test.inputs[0] is not y:
        return False
    replacement = op.const(x)
    return replacement is not None and replacement.size == 1 and not replacement.any()


def _number(op: Builder, value: ir.Value | None) -> float | None:
    """A constant of one element that broadcasts to anything."""
    known = op.const(value) if value is not None and rank_of(value) in (0, 1) else None
    return None if known is None or known.size != 1 else float(known.reshape(()))


def _made_by(value: ir.Value | None, op_type: str, reader: ir.Node) -> ir.Node | None:
    """The operator that makes a value in the graph of its reader: in no enclosing one, whose backward is another sweep."""
    maker = None if value is None else value.producer()
    return maker if maker is not None and maker.op_type == op_type and maker.domain == "" and maker.graph is reader.graph else None


def _factor(op: Builder, value: ir.Value, reader: ir.Node) -> tuple[ir.Value, float]:
    """``x * number`` as (x, number)."""
    if (maker := _made_by(value, "Mul", reader)) is not None:
        for x, other in (maker.inputs, maker.inputs[::-1]):
            if (number := _number(op, other)) is not None:
                return x, number
    if (maker := _made_by(value, "Div", reader)) is not None and (number := _number(op, maker.inputs[1])):
        return maker.inputs[0], 1 / number
    return value, 1.0


# ------------------------------------------------------------------------------------------------------------ attention
def attention(op: Builder, node: ir.Node, g: ir.Value) -> dict[ir.Value, ir.Value] | None:
    """The gradients of q, k^T and v for ``softmax(scale q k^T + mask) v``, the scale anywhere, the mask no function of wrt.

    With p the softmax and o the result, dv = p^T g and ds = p (g v^T - sum(g o)): the sum is that of p times g v^T, over
    the width of a head instead of all places. The scale goes onto g, the smallest.
    """
    p, v = node.inputs
    guard = _made_by(p, "Where", node)
    softmax = _made_by(guard.inputs[2] if guard is not None and is_masked_softmax(op, *guard.inputs) else p, "Softmax", node)
    rank = rank_of(p)
    if softmax is None or rank is None or rank < 3 or p.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return None
    if attr(softmax, "axis", -1) % rank != rank - 1 or (guard is None and len(softmax.outputs[0].uses()) > 1):
        return None
    scores, scale = _scores(op, softmax.inputs[0], node)
    product = _made_by(scores, "MatMul", node)
    if product is None:
        return None
    (q, a), (kt, b) = (_factor(op, x, node) for x in product.inputs)
    lead = list(v.shape or ())[:-2]
    if any(type(d) is not int and d.value is None for d in lead) or not all(
        rank_of(x) == rank and list(x.shape)[:-2] == lead for x in (q, kt, p, v)
    ):
        return None
    whole = scale * a * b
    scaled = g if whole == 1.0 else op.Mul(g, whole)
    dp = op.MatMul(scaled, swap(op, v, rank))
    ds = p * (dp - op.ReduceSum(op.Mul(scaled, node.outputs[0]), [-1], keepdims=1))
    dk = op.MatMul(swap(op, ds, rank), q)
    dk.shape = ir.Shape([*lead, kt.shape[rank - 1], kt.shape[rank - 2]])
    dkt = op.transpose(dk, [*range(rank - 2), rank - 1, rank - 2])
    return {q: op.MatMul(ds, _untransposed(op, kt, rank, node)), kt: dkt, v: op.MatMul(swap(op, p, rank), g)}


def _scores(op: Builder, x: ir.Value, reader: ir.Node) -> tuple[ir.Value, float]:
    """What stands before masks, as (x, factor)."""
    scale = 1.0
    while True:
        before, number = _factor(op, x, reader)
        scale *= number
        masked = _made_by(before, "Add", reader)
        if masked is not None and before.shape is not None:
            kept = [v for v, mask in (masked.inputs, masked.inputs[::-1]) if mask not in op.scope.active and v.shape == before.shape]
            before = kept[0] if kept else before
        if before is x:
            return x, scale
        x = before


def _untransposed(op: Builder, kt: ir.Value, rank: int, reader: ir.Node) -> ir.Value:
    """k; also where k^T was made with the leading axes as one."""
    apart = _made_by(kt, "Reshape", reader)
    turn = _made_by(apart.inputs[0], "Transpose", reader) if apart is not None else None
    merge = _made_by(turn.inputs[0], "Reshape", reader) if turn is not None and list(attr(turn, "perm") or ()) == [0, 2, 1] else None
    if merge is not None:
        k, shape = merge.inputs[0], static_shape(kt)
        if shape is not None and static_shape(k) == (*shape[:-2], shape[-1], shape[-2]):
            return k
    return swap(op, kt, rank)


# ----------------------------------------------------------------------------------------------------------------- GELU
def tanh_gelu(op: Builder, node: ir.Node, g: ir.Value) -> dict[ir.Value, ir.Value] | None:
    """The gradient of x for ``y = h x (1 + tanh u)``, u = c (x + k x^3).

    dy/dx = h (1 + t) (1 + (1 - t) x u') and x u' = 3 u - 2 c x: no power, and what the forward has is used again.
    """
    for left, right in (node.inputs, node.inputs[::-1]):
        x, h = _factor(op, left, node)
        outer = _made_by(right, "Add", node)
        if outer is None or h == 0.0:
            continue
        tanh = next((m for i in (0, 1) if _number(op, outer.inputs[1 - i]) == 1.0 and (m := _made_by(outer.inputs[i], "Tanh", node))), None)
        if tanh is None:
            continue
        u, t = tanh.inputs[0], tanh.outputs[0]
        polynomial, c = _factor(op, u, node)
        terms = _made_by(polynomial, "Add", node)
        cube = next((o for v, o in (terms.inputs, terms.inputs[::-1]) if v is x), None) if terms is not None else None
        power = None if cube is None else _made_by(_factor(op, cube, node)[0], "Pow", node)
        if power is None or power.inputs[0] is not x or _number(op, power.inputs[1]) != 3.0:
            continue
        slope = (u - left * (2 * c / (3 * h))) * (1.0 - t)
        factor = op.Mul(right * (slope + 1 / 3), 3 * h)
        factor.shape = x.shape
        return {x: op.Mul(g, factor)}
    return None
