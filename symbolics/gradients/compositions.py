"""Closed forms for what exporters write in several nodes: attention, the tanh form of GELU.

A rule asks here first; the answer maps the values that the whole reads to their gradients, and says nothing about those
in between. None where the pattern does not match: then the rules of the parts apply. Values in between may have other uses:
gradients on those ways come from the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir import Value

from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, made_by, rank_of, static_shape

__all__ = ["attention", "is_masked_softmax", "swap", "tanh_gelu"]


def swap(op: Builder, x: Value, rank: int) -> Value:
    """The transpose of the last two axes; what x is the transpose of, where it is one.

    Any other Transpose before it stays apart: runtimes fuse a swap of the last two axes into the product that reads it.
    """
    perm = [*range(rank - 2), rank - 1, rank - 2]
    maker = made_by(x, "Transpose")
    if maker is not None and list(attr(maker, "perm") or ()) == perm and (before := maker.inputs[0]) is not None:
        return before
    return op.memo(("swap", x), lambda: op.Transpose(x, perm=perm))


def is_masked_softmax(op: Builder, condition: Value | None, x: Value | None, y: Value | None) -> bool:
    """Whether ``Where(condition, x, y)`` is a softmax with 0 for the NaN of its fully masked rows."""
    test = made_by(condition, "IsNaN")
    if made_by(y, "Softmax") is None or test is None or test.inputs[0] is not y:
        return False
    replacement = op.const(x)
    return replacement is not None and replacement.size == 1 and not replacement.any()


@dataclass
class _Matcher:
    """Reads the forward backwards, within one graph: not into an enclosing one, whose backward is another sweep."""

    op: Builder
    graph: ir.Graph | ir.Function | None

    def maker(self, value: Value | None, op_type: str) -> ir.Node | None:
        """The node that makes a value, where it is of this operator."""
        maker = made_by(value, op_type)
        return maker if maker is not None and maker.graph is self.graph else None

    def operands(self, value: Value | None, op_type: str) -> list[Value]:
        """What such a node reads; nothing where it is another."""
        maker = self.maker(value, op_type)
        return [] if maker is None else [v for v in maker.inputs if v is not None]

    def number(self, value: Value | None) -> float | None:
        """A constant of one element that broadcasts to anything."""
        known = self.op.const(value) if value is not None and rank_of(value) in (0, 1) else None
        return None if known is None or known.size != 1 else float(known.reshape(()))

    def factor(self, value: Value) -> tuple[Value, float]:
        """``x * number`` as (x, number)."""
        for x, other in _orders(self.operands(value, "Mul")):
            if (number := self.number(other)) is not None:
                return x, number
        if (quotient := self.operands(value, "Div")) and (number := self.number(quotient[1])):
            return quotient[0], 1 / number
        return value, 1.0


def _orders(pair: Sequence[Value | None]) -> list[tuple[Value, Value]]:
    """Two operands of a commutative operator, and the same the other way round."""
    a, b = pair if len(pair) == 2 else (None, None)
    return [] if a is None or b is None else [(a, b), (b, a)]


# ------------------------------------------------------------------------------------------------------------ attention
def attention(op: Builder, node: ir.Node, g: Value) -> dict[Value, Value] | None:
    """The gradients of q, k^T and v for ``softmax(scale q k^T + mask) v``, the scale anywhere, the mask no function of wrt.

    With p the softmax and o the result, dv = p^T g and ds = p (g v^T - sum(g o)): the sum is that of p times g v^T, over
    the width of a head instead of all places. The scale goes onto g, the smallest.
    """
    match = _Matcher(op, node.graph)
    (p, v), rank = _orders(node.inputs)[0], rank_of(node.inputs[0])
    guard = match.operands(p, "Where")
    softmax = match.maker(guard[2] if guard and is_masked_softmax(op, *guard) else p, "Softmax")
    if softmax is None or rank is None or rank < 3 or p.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return None
    if attr(softmax, "axis") % rank != rank - 1 or (not guard and len(softmax.outputs[0].uses()) > 1):
        return None
    scores, scale = _scores(match, softmax.inputs[0])
    product = match.operands(scores, "MatMul")
    if not product:
        return None
    (q, a), (kt, b) = (match.factor(x) for x in product)
    shapes = [x.shape for x in (v, q, kt, p)]
    lead = list(v.shape or ())[:-2]
    if any(not isinstance(d, int) and d.value is None for d in lead):
        return None
    if any(shape is None or len(shape) != rank or list(shape)[:-2] != lead for shape in shapes):
        return None
    whole = scale * a * b
    scaled = g if whole == 1.0 else op.Mul(g, whole)
    dp = op.MatMul(scaled, swap(op, v, rank))
    ds = p * (dp - op.ReduceSum(op.Mul(scaled, node.outputs[0]), [-1], keepdims=1))
    dk = op.MatMul(swap(op, ds, rank), q)
    dk.shape = ir.Shape([*lead, *list(kt.shape or ())[:-3:-1]])
    dkt = op.Transpose(dk, perm=[*range(rank - 2), rank - 1, rank - 2])
    found: dict[Value, Value] = {}
    for x, dx in ((q, op.MatMul(ds, _untransposed(match, kt, rank))), (kt, dkt), (v, op.MatMul(swap(op, p, rank), g))):
        found[x] = op.Add(found[x], dx) if x in found else dx  # one tensor may be queries, keys and values
    return found


def _scores(match: _Matcher, x: Value | None) -> tuple[Value | None, float]:
    """What stands before masks, as (x, factor)."""
    scale = 1.0
    while x is not None:
        before, number = match.factor(x)
        scale *= number
        if before.shape is not None:
            masked = _orders(match.operands(before, "Add"))
            before = next((v for v, mask in masked if mask not in match.op.scope.active and v.shape == before.shape), before)
        if before is x:
            break
        x = before
    return x, scale


def _untransposed(match: _Matcher, kt: Value, rank: int) -> Value:
    """k; also where k^T was made with the leading axes as one."""
    turned, *_ = [*match.operands(kt, "Reshape"), None]
    turn = match.maker(turned, "Transpose")
    if turn is not None and list(attr(turn, "perm") or ()) == [0, 2, 1]:
        k, *_ = [*match.operands(turn.inputs[0], "Reshape"), None]
        shape = static_shape(kt)
        if k is not None and shape is not None and static_shape(k) == (*shape[:-2], shape[-1], shape[-2]):
            return k
    return swap(match.op, kt, rank)


# ----------------------------------------------------------------------------------------------------------------- GELU
def tanh_gelu(op: Builder, node: ir.Node, g: Value) -> dict[Value, Value] | None:
    """The gradient of x for ``y = h x (1 + tanh u)``, u = c (x + k x^3).

    dy/dx = h (1 + t) (1 + (1 - t) x u') and x u' = 3 u - 2 c x: no power, and what the forward has is used again.
    """
    match = _Matcher(op, node.graph)
    for hx, sum_ in _orders(node.inputs):
        x, h = match.factor(hx)
        for t, one in _orders(match.operands(sum_, "Add")):
            for u in match.operands(t, "Tanh") if h != 0.0 and match.number(one) == 1.0 else ():
                polynomial, c = match.factor(u)
                for same, kx3 in _orders(match.operands(polynomial, "Add")):
                    power = match.operands(match.factor(kx3)[0], "Pow")
                    if same is x and power and power[0] is x and match.number(power[1]) == 3.0:
                        slope = (u - hx * (2 * c / (3 * h))) * (1.0 - t)
                        factor = op.Mul(sum_ * (slope + 1 / 3), 3 * h)
                        factor.shape = x.shape
                        return {x: op.Mul(g, factor)}
    return None
