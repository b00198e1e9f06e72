"""Gradients that are there only where a condition holds: the branch of an If that was taken, an iteration behind which somebody reads on.

Eager mode has no gradient elsewhere: it calls no backward, and what it would compute of zeros (0 times infinity) does not arise. In a graph
every value has numbers. So a gradient carries its condition along, through the rules that know nothing of it; where it meets another
one, or leaves the sweep, zeros take its place wherever it is not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from symbolics.graph.builder import Builder

__all__ = ["Conditions", "conditions_of", "gate", "holds", "is_gate", "joint", "mark", "sum_of", "through_gate", "without_elements"]

_GATE = "pythonop.gate"  # node.metadata_props

#: Booleans of which one has to hold; None: the gradient is always there.
Conditions = frozenset[ir.Value] | None


def conditions_of(op: Builder, g: ir.Value) -> Conditions:
    """Where a gradient is there."""
    found = op.scope.presence.get(g)
    return None if found is None else found[0]


def mark(op: Builder, g: ir.Value, conditions: Conditions, *, zeros_elsewhere: bool = False) -> ir.Value:
    """The gradient, which is there only where one of these holds.

    Args:
        g: The gradient. No other gradient is the same value.
        conditions: Boolean scalars that the graph of ``op`` can read.
        zeros_elsewhere: Whether it is known to be zeros where none of them holds. Otherwise its numbers mean nothing there.
    """
    if conditions is not None:
        op.scope.presence[g] = conditions, zeros_elsewhere
    return g


def joint(op: Builder, gs: Iterable[ir.Value | None]) -> Conditions:
    """Where at least one of these gradients is there."""
    found: set[ir.Value] = set()
    for g in gs:
        if g is not None:
            if (conditions := conditions_of(op, g)) is None:
                return None
            found |= conditions
    return frozenset(found)


def holds(op: Builder, conditions: Conditions) -> ir.Value:
    """Whether one of these holds, as a boolean scalar: always, where there is None; never, where there is none."""
    if not conditions:
        return op.constant(conditions is None, ir.DataType.BOOL)
    first, *others = sorted(conditions, key=lambda v: v.name or "")
    for other in others:
        first = op.Or(first, other)
    return first


def gate(op: Builder, g: ir.Value) -> ir.Value:
    """The gradient with zeros where it is not there."""
    conditions, zeros_elsewhere = op.scope.presence.get(g, (None, True))
    if conditions is None or zeros_elsewhere:
        return g
    gated = op.raw("Where", [holds(op, conditions), g, op.number(0.0, g)])
    gated.shape = g.shape
    op.nodes[-1].metadata_props[_GATE] = "1"
    return mark(op, gated, conditions, zeros_elsewhere=True)


def is_gate(node: ir.Node) -> bool:
    """Whether a node is what `gate` made, in this build or an earlier one."""
    return node.op_type == "Where" and _GATE in node.metadata_props


def through_gate(op: Builder, node: ir.Node, g: ir.Value) -> ir.Value:
    """The gradient of a gradient that was gated: where that was not there, eager mode has computed nothing."""
    condition, conditions = node.inputs[0], conditions_of(op, g)
    assert condition is not None
    if conditions is not None:
        condition = op.And(condition, holds(op, conditions))
    return mark(op, op.raw("Identity", [g]), frozenset([condition]))


def sum_of(op: Builder, parts: Sequence[ir.Value], like: ir.Value) -> ir.Value:
    """The sum of gradients of one value; it is there where one of them is."""
    total = op.add_up([gate(op, part) for part in parts], like)
    return mark(op, total, joint(op, parts), zeros_elsewhere=True)


def without_elements(op: Builder, g: ir.Value) -> ir.Value:
    """The gradient, without any element where it is not there: so a PythonOpGrad takes it for one that is absent."""
    conditions = conditions_of(op, g)
    if conditions is None:
        return g
    there, begin, end, none = holds(op, conditions), op.i64([0]), op.i64([2**63 - 1]), op.i64([0])
    kept = op.Where(there, end, none)
    if g.shape is not None and len(g.shape):
        return op.Slice(g, begin, kept, begin)
    # What has no dimensions cannot be cut: it is a vector for that, and gets its own shape again where it is there, as its backward looks at it.
    shape = op.Slice(none, begin, op.Where(there, none, end))
    if g.shape is None:
        shape = op.Concat(op.Slice(op.Shape(g), begin, kept), shape, axis=0)
    return op.Reshape(op.Slice(op.flat(g), begin, kept, begin), shape, allowzero=1)
