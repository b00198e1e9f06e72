"""Nodes that need not be made, or can be made simpler: a table that is consulted where a node is born.

A row gets the emitter, and the inputs and attributes of the node as the caller wrote them. It returns the value that takes the
node's place, or None where it has nothing to say. Rows hold for every form of their operator: what is not known statically
is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from symbolics.graph.emitter import Emitter, Operand
from symbolics.graph.values import HALVES, attr, made_by, rank_of, static_shape

__all__ = ["PEEPHOLES", "is_reduction_of_halves", "made_here", "peephole"]

Row = Callable[..., ir.Value | None]
_R = TypeVar("_R", bound=Row)

PEEPHOLES: dict[str, list[Row]] = {}
_END = np.iinfo(np.int64).max
_FOLDED_SIZE = 64


def peephole(*op_types: str) -> Callable[[_R], _R]:
    """Add a row for standard operators with one output; several of one operator are asked in turn."""

    def register(row: _R) -> _R:
        for op_type in op_types:
            PEEPHOLES.setdefault(op_type, []).append(row)
        return row

    return register


def made_here(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes a value, where it is of this operator and was made in this build: no graph has it yet."""
    node = made_by(value, op_type)
    return node if node is not None and node.graph is None else None


def _numbers(op: Emitter, operand: Operand) -> list[int] | None:
    """Integers that are known now: a list, or a constant; nothing is computed to find out."""
    if isinstance(operand, (list, tuple)):
        return [int(d) for d in operand] if all(isinstance(d, (int, np.integer)) for d in operand) else None
    if isinstance(operand, np.ndarray):
        return [int(d) for d in operand.reshape(-1)]
    return op.ints(operand) if isinstance(operand, ir.Value) and operand.producer() is None else None


def _shaped(x: ir.Value, dims: Sequence[int]) -> ir.Value:
    if min(dims, default=1) > 0:
        x.shape = ir.Shape(dims)
    return x


# ------------------------------------------------------------------------------------------------------- known numbers
def _folded(function: Callable[..., np.ndarray]) -> Row:
    def row(op: Emitter, *operands: Operand) -> ir.Value | None:
        """Arithmetic of integers that are known is done now."""
        arrays: list[np.ndarray] = []
        for v in operands:
            if isinstance(v, ir.Value):
                if v.dtype is not ir.DataType.INT64 or (array := op.const(v)) is None or array.size > _FOLDED_SIZE:
                    return None
                arrays.append(array)
            elif isinstance(v, (int, list, tuple, np.ndarray)) and any(isinstance(o, ir.Value) for o in operands):
                arrays.append(np.asarray(v, np.int64))
            else:
                return None
        return op.i64(function(*arrays))

    return row


peephole("Add")(_folded(np.add))
peephole("Sub")(_folded(np.subtract))
peephole("Mul")(_folded(np.multiply))
peephole("Neg")(_folded(np.negative))
peephole("Max")(_folded(lambda *a: np.maximum.reduce(np.broadcast_arrays(*a))))
peephole("Min")(_folded(lambda *a: np.minimum.reduce(np.broadcast_arrays(*a))))


@peephole("Shape")
def known_dims(op: Emitter, x: ir.Value, *, start: int = 0, end: int | None = None) -> ir.Value:
    """Static dims are a constant; others are asked for once."""
    dims = None if x.shape is None else x.shape[start:end]
    if dims is not None and all(type(d) is int for d in dims):
        return op.i64(list(dims))
    return op.memo(("Shape", x, start, end), lambda: op.raw("Shape", [x], start=start or None, end=end))


@peephole("Size")
def known_size(op: Emitter, x: ir.Value) -> ir.Value:
    """A static size is a constant; another is asked for once."""
    dims = static_shape(x)
    return op.i64(int(np.prod(dims))) if dims is not None else op.memo(("Size", x), lambda: op.raw("Size", [x]))


@peephole("Cast")
def to_its_own_type(op: Emitter, x: Operand, *, to: int | None, **rest: object) -> ir.Value | None:
    """A Cast to the type that the value has, or to a type that is not known, does nothing."""
    return x if isinstance(x, ir.Value) and (to is None or x.dtype == to) else None


# ------------------------------------------------------------------------------------------------------------- Reshape
@peephole("Reshape")
def of_known_numbers(op: Emitter, x: Operand, shape: Operand, *, allowzero: int = 0) -> ir.Value | None:
    """Integers that are known get their shape now."""
    known = op.const(x) if isinstance(x, ir.Value) and x.dtype is ir.DataType.INT64 and x.producer() is None else None
    dims = _numbers(op, shape)
    return op.i64(known.reshape(dims)) if known is not None and known.size <= _FOLDED_SIZE and dims and 0 not in dims else None


@peephole("Reshape")
def of_nothing(op: Emitter, x: Operand, shape: Operand, *, allowzero: int = 0) -> ir.Value | None:
    """A 0 among known dims of a tensor without elements is a 0, not the dim of that place."""
    whole, dims = static_shape(x) if isinstance(x, ir.Value) else None, _numbers(op, shape)
    if allowzero or whole is None or 0 not in whole or not dims or 0 not in dims:
        return None
    given, rest = (math.prod(d for d in sizes if d > 0) for sizes in (dims, whole))
    dims = [rest // given if d == -1 else d for d in dims]
    return _shaped(op.raw("Reshape", [x, dims], allowzero=1), dims)


@peephole("Reshape")
def reshape(op: Emitter, x: Operand, shape: Operand, *, allowzero: int = 0) -> ir.Value | None:
    """To known dims: once, of what was reshaped before it, or not at all where that has the dims already."""
    if not isinstance(x, ir.Value) or not (dims := _target(op, x, shape, allowzero)):
        return None  # without dims it makes a scalar, also of what an evaluator holds as a vector of one element
    if (before := made_here(x, "Reshape")) is not None and before.inputs[0] is not None:
        x = before.inputs[0]
    if static_shape(x) == tuple(dims):
        return x
    if (found := _of_merged_transpose(op, x, dims) or _of_product(op, x, dims)) is not None:
        return found
    return op.memo(("Reshape", x, tuple(dims)), lambda: _shaped(op.raw("Reshape", [x, dims]), dims))


def _target(op: Emitter, x: ir.Value, shape: Operand, allowzero: int) -> list[int] | None:
    """The dims of a Reshape, with what 0 and -1 stand for where the shape before tells; None where a dim is 0 or not known."""
    dims, whole = _numbers(op, shape), static_shape(x)
    if dims is None:
        return None
    if whole is not None and not allowzero:
        dims = [whole[i] if d == 0 and i < len(whole) else d for i, d in enumerate(dims)]
    if 0 in dims:
        return None
    if -1 in dims and whole is not None and 0 not in whole:
        dims = [int(np.prod(whole)) // -int(np.prod(dims)) if d == -1 else d for d in dims]
    return dims


def _of_merged_transpose(op: Emitter, x: ir.Value, dims: list[int]) -> ir.Value | None:
    """Reshape(Transpose(Reshape(z))) that merges leading axes of z for the Transpose alone, as a Transpose of z."""
    turn = made_by(x, "Transpose")
    merge = None if turn is None else made_by(turn.inputs[0], "Reshape")
    perm = None if turn is None else attr(turn, "perm")
    if merge is None or perm is None or perm[0] != 0:
        return None
    z, merged = merge.inputs[0], op.ints(merge.inputs[1])
    shape = static_shape(z)
    lead = 0 if shape is None else len(shape) - len(perm) + 1
    if z is None or merged is None or shape is None or lead < 1 or list(shape[lead:]) != merged[1:]:
        return None
    if dims != [*shape[:lead], *[merged[p] for p in perm[1:]]]:
        return None
    return op.Transpose(z, perm=[*range(lead), *[lead - 1 + p for p in perm[1:]]])


def _of_product(op: Emitter, x: ir.Value, dims: list[int]) -> ir.Value | None:
    """Of a product whose one factor was reshaped from these dims: that factor, times the other one reshaped."""
    product = made_here(x, "Mul")
    if product is None:
        return None
    for left, right in (product.inputs, product.inputs[::-1]):
        before = made_here(left, "Reshape")
        same = static_shape(left) is not None and static_shape(right) == static_shape(left)
        if same and before is not None and static_shape(before.inputs[0]) == tuple(dims):
            return _shaped(op.Mul(before.inputs[0], op.Reshape(right, dims)), dims)
    return None


# -------------------------------------------------------------------------------------------------- Transpose, Concat
@peephole("Transpose")
def transpose(op: Emitter, x: Operand, *, perm: Sequence[int] | None = None) -> ir.Value | None:
    """Transpose(Transpose(z, p), q) is Transpose(z, p[q]); in the order that is, it is nothing."""
    perm = None if not isinstance(x, ir.Value) else _perm(x, perm)
    if perm is None or not isinstance(x, ir.Value):
        return None
    inner = made_by(x, "Transpose")
    if inner is not None and (z := inner.inputs[0]) is not None and (first := _perm(z, attr(inner, "perm"))) is not None:
        return op.Transpose(z, perm=[first[p] for p in perm])
    if list(perm) == list(range(len(perm))):
        return x
    if list(perm) == [1, 0] and (product := made_here(x, "Gemm")) is not None and len(product.inputs) == 2:
        a, b = product.inputs  # (a b)' is b' a'
        flags = {"transA": 1 - attr(product, "transB"), "transB": 1 - attr(product, "transA"), "alpha": attr(product, "alpha", None)}
        return op.Gemm(b, a, **{k: v for k, v in flags.items() if v})
    turned = op.raw("Transpose", [x], perm=list(perm))
    if x.shape is not None:
        turned.shape = ir.Shape([x.shape[p] for p in perm])
    return turned


def _perm(x: ir.Value, perm: Sequence[int] | None) -> Sequence[int] | None:
    """The order of a Transpose of x; without one it turns the axes around."""
    return range(rank)[::-1] if perm is None and (rank := rank_of(x)) is not None else perm


@peephole("Concat")
def concat(op: Emitter, *parts: Operand, axis: int) -> ir.Value | None:
    """One part is itself; parts that were transposed and reshaped alike are one Transpose and one Reshape of a Concat."""
    values = [p for p in parts if isinstance(p, ir.Value)]
    if len(parts) == 1 and values:
        return values[0]
    shapes = [s for v in values if (s := static_shape(v)) is not None]
    apart = [z for v in values if (maker := made_here(v, "Reshape")) is not None and (z := maker.inputs[0]) is not None]
    inner = [s for z in apart if (s := static_shape(z)) is not None]
    if not len(parts) == len(shapes) == len(apart) == len(inner) or axis % len(shapes[0]) != len(shapes[0]) - 1:
        return None
    axis %= len(shapes[0])  # the last: of each part the Reshape merged what was behind it
    if any(len(s) <= axis or s[:axis] != t[:axis] or s[axis + 1 :] != inner[0][axis + 1 :] for s, t in zip(inner, shapes)):
        return None
    joined = _shaped(_joined(op, apart, axis), [*inner[0][:axis], sum(s[axis] for s in inner), *inner[0][axis + 1 :]])
    return op.Reshape(joined, [*shapes[0][:axis], sum(s[axis] for s in shapes)])


def _joined(op: Emitter, parts: Sequence[ir.Value], axis: int) -> ir.Value:
    makers = [m for p in parts if (m := made_here(p, "Transpose")) is not None]
    perms = {tuple(attr(m, "perm") or ()) for m in makers}
    if len(makers) == len(parts) and len(perms) == 1 and (perm := perms.pop()):
        return op.raw("Transpose", [op.Concat(*[m.inputs[0] for m in makers], axis=perm[axis])], perm=list(perm))
    return op.raw("Concat", parts, axis=axis)


# ----------------------------------------------------------------------------------------------------------------- Pad
@peephole("Pad")
def pad(op: Emitter, x: Operand, pads: Operand, value: Operand = None, axes: Operand = None, *, mode: str | None = None) -> ir.Value | None:
    """By nothing it is nothing. Negative amounts cut off: as a Slice, which every runtime has, where they are known."""
    amounts = _numbers(op, pads)
    if amounts is None or not isinstance(x, ir.Value):
        return None
    if not any(amounts):
        return x
    n = len(amounts) // 2
    places = list(range(n)) if axes is None else _numbers(op, axes)
    if min(amounts) >= 0 or places is None or mode not in (None, "constant"):
        return None
    cut = [(a, max(-b, 0), -max(-e, 0) or _END) for a, b, e in zip(places, amounts[:n], amounts[n:]) if b < 0 or e < 0]
    x = op.Slice(x, [b for _, b, _ in cut], [e for _, _, e in cut], [a for a, _, _ in cut])
    return op.Pad(x, [max(v, 0) for v in amounts], value, axes if axes is None else places)


# -------------------------------------------------------------------------------------------------------------- Scatter


def is_reduction_of_halves(data: ir.Value | None, reduction: str | None) -> bool:
    """Whether a scatter adds numbers of 16 bits: onnxruntime has no kernel for that."""
    return data is not None and data.dtype in HALVES and reduction not in (None, "none")


def _scatter(op_type: str) -> Row:
    def row(
        op: Emitter, data: Operand, indices: Operand, updates: Operand, *, reduction: str | None = None, **attributes: Any
    ) -> ir.Value | None:
        """In float32, the type that PyTorch adds in."""
        if not isinstance(data, ir.Value) or not is_reduction_of_halves(data, reduction):
            return None
        wide = [op.Cast(value, to=ir.DataType.FLOAT) for value in (data, updates)]
        found: ir.Value = op.Cast(op.raw(op_type, [wide[0], indices, wide[1]], reduction=reduction, **attributes), to=data.dtype)
        return found

    return row


for _name in ("ScatterND", "ScatterElements"):
    peephole(_name)(_scatter(_name))
