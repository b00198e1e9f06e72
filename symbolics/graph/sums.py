"""Sums whose parts tell how they were made: what a tensor read in pieces, or used many times, gets as its gradient.

A recurrence that was written out reads its input a step at a time and uses its weights at each. The gradient of the input is then a
sum of pieces, each padded with zeros to the whole; that of a weight a sum of products. Added as they stand they cost the square of
the steps; side by side they are one Concat, and one product of two of them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import onnx_ir as ir

from symbolics.graph.emitter import Emitter
from symbolics.graph.peepholes import made_here
from symbolics.graph.values import attr, static_shape

__all__ = ["joined"]

_SMALL = 2**15  # elements of a matrix that is cheaper to copy than to reduce alone


def joined(op: Emitter, parts: Sequence[ir.Value], like: ir.Value) -> list[ir.Value]:
    """Fewer values with the same sum: ``parts``, which have the shape of ``like``, where they are pieces, products or sums of rows."""
    found = list(parts)
    for kind, join in ((_piece, _pieces), (_product, _products), (_sum_of_rows, _sums_of_rows)):
        groups: dict[Hashable, list[tuple[ir.Value, Any]]] = {}
        rest = []
        for part in found:
            told = kind(op, part, like)
            if told is None:
                rest.append(part)
            else:
                groups.setdefault(told[0], []).append((part, told[1]))
        found = rest
        for key, members in groups.items():
            found += join(op, key, members, like) if len(members) > 1 else [part for part, _ in members]
    return found


def _concat(op: Emitter, parts: Sequence[ir.Value], axis: int) -> ir.Value:
    """Side by side, once: a weight's gradient and a bias's may read the same."""

    def make() -> ir.Value:
        whole = op.Concat(*parts, axis=axis)
        shapes = [static_shape(part) for part in parts]
        if whole.shape is None and None not in shapes:
            first = list(shapes[0] or ())
            first[axis] = sum(shape[axis] for shape in shapes if shape is not None)
            whole.shape = ir.Shape(first)
        return whole

    return op.memo(("side by side", axis, tuple(parts)), make)


# -------------------------------------------------------------------------------------------------------------- pieces
def _piece(op: Emitter, part: ir.Value, like: ir.Value) -> tuple[int, tuple[int, int, ir.Value]] | None:
    """axis -> first place, last place, what was padded with zeros along that axis alone."""
    pad = made_here(part, "Pad")
    amounts = None if pad is None or any(v is not None for v in pad.inputs[2:]) else op.ints(pad.inputs[1])
    if (
        pad is None
        or amounts is None
        or like.shape is None
        or len(amounts) != 2 * len(like.shape)
        or attr(pad, "mode") not in (None, "constant")
    ):
        return None
    n = len(like.shape)
    padded = [axis for axis in range(n) if amounts[axis] or amounts[axis + n]]
    if len(padded) != 1 or min(amounts) < 0 or pad.inputs[0] is None:
        return None
    size = like.shape[padded[0]]
    return None if not isinstance(size, int) else (padded[0], (amounts[padded[0]], size - amounts[padded[0] + n], pad.inputs[0]))


def _pieces(op: Emitter, axis: Any, members: Sequence[tuple[ir.Value, Any]], like: ir.Value) -> list[ir.Value]:
    """Those that do not overlap one behind the other, zeros between them: a Concat for each layer of them."""
    assert like.shape is not None
    size, n = like.shape[axis], len(like.shape)
    assert isinstance(size, int)
    layers: list[list[tuple[ir.Value, tuple[int, int, ir.Value]]]] = []
    for member in sorted(members, key=lambda m: m[1][:2]):
        layer = next((layer for layer in layers if layer[-1][1][1] <= member[1][0]), None)
        if layer is None:
            layers.append([member])
        else:
            layer.append(member)
    found = []
    for layer in layers:
        if len(layer) == 1:
            found.append(layer[0][0])
            continue
        ends = [first for _, (first, _, _) in layer[1:]] + [size]
        before = layer[0][1][0]
        pieces = []
        for (_, (_, last, piece)), end in zip(layer, ends, strict=True):
            amounts = [0] * (2 * n)
            amounts[axis], amounts[axis + n] = before, end - last
            pieces.append(op.Pad(piece, amounts))
            before = 0
        whole = _concat(op, pieces, axis)
        if whole.shape is None:
            whole.shape = like.shape
        found.append(whole)
    return found


# ------------------------------------------------------------------------------------------------------------ products
def _product(op: Emitter, part: ir.Value, like: ir.Value) -> tuple[Hashable, tuple[ir.Value, ir.Value]] | None:
    """How a Gemm reads its matrices -> these, where their sizes are known."""
    gemm = made_here(part, "Gemm")
    if gemm is None or len(gemm.inputs) != 2:
        return None
    a, b = gemm.inputs
    if a is None or b is None or static_shape(a) is None or static_shape(b) is None:
        return None
    return (attr(gemm, "transA", 0), attr(gemm, "transB", 0), attr(gemm, "alpha", 1.0)), (a, b)


def _products(op: Emitter, key: Any, members: Sequence[tuple[ir.Value, Any]], like: ir.Value) -> list[ir.Value]:
    """One product of what they read side by side, where that is less than what they make."""
    turned_a, turned_b, alpha = key
    lefts, rights = [a for _, (a, _) in members], [b for _, (_, b) in members]
    a, b = static_shape(lefts[0]) or (), static_shape(rights[0]) or ()
    rows, columns = a[1 if turned_a else 0], b[0 if turned_b else 1]
    terms = sum((static_shape(left) or ())[0 if turned_a else 1] for left in lefts)
    if terms * (rows + columns) > len(members) * rows * columns:
        return [part for part, _ in members]
    flags = {k: v for k, v in (("transA", turned_a), ("transB", turned_b), ("alpha", None if alpha == 1.0 else alpha)) if v}
    whole = op.Gemm(_concat(op, lefts, 0 if turned_a else 1), _concat(op, rights, 1 if turned_b else 0), **flags)
    whole.shape = ir.Shape([rows, columns])
    return [whole]


# --------------------------------------------------------------------------------------------------------- sums of rows
def _sum_of_rows(op: Emitter, part: ir.Value, like: ir.Value) -> tuple[Hashable, ir.Value] | None:
    """The shape of a row -> a small tensor of rows that a ReduceSum adds."""
    reduced = made_here(part, "ReduceSum")
    if reduced is None or attr(reduced, "keepdims") or len(reduced.inputs) != 2:
        return None
    rows, axes = reduced.inputs[0], op.ints(reduced.inputs[1])
    shape = static_shape(rows)
    if rows is None or shape is None or axes is None or 0 not in axes or math.prod(shape) > _SMALL:
        return None
    return (shape[1:], tuple(axes)), rows


def _sums_of_rows(op: Emitter, key: Any, members: Sequence[tuple[ir.Value, Any]], like: ir.Value) -> list[ir.Value]:
    """The rows of all of them at once."""
    return [op.ReduceSum(_concat(op, [rows for _, rows in members], 0), list(key[1]), keepdims=0)]
