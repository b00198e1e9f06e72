"""What rules write with: nodes by operator (`symbolics.graph.emitter`), simplified where they are born
(`symbolics.graph.peepholes`), and the phrases that many rules need: shapes, masks, sums over what was broadcast.

Shapes come from the forward graph. Rules need nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from symbolics.graph.emitter import Emitter
from symbolics.graph.peepholes import PEEPHOLES, made_here
from symbolics.graph.sums import joined
from symbolics.graph.values import HALVES, dtype_of, static_shape, unknown_because, unsupported
from symbolics.node.limits import MAX_UNROLLED

__all__ = ["Builder"]

_COUNTED = 256  # every whole number up to this is one of bfloat16, and so of float16


class Builder(Emitter):
    """An emitter whose nodes are as few and as simple as what is known allows, with the vocabulary of rules."""

    peepholes = PEEPHOLES

    # ----------------------------------------------------------------------------------------------------- shapes
    def dim(self, x: ir.Value, axis: int) -> int | ir.Value:
        """One dim: a number where it is static, otherwise an int64 vector of one element."""
        if x.shape is not None:
            if isinstance(dim := x.shape[axis], int):
                return dim
            axis %= len(x.shape)
        return self.Shape(x, start=axis, end=axis + 1 or None)

    def padded(
        self, x: ir.Value, before: Sequence[int | ir.Value], after: Sequence[int | ir.Value], axes: Sequence[int], rank: int
    ) -> ir.Value:
        """Pad x, which has so many axes, by so much in front of and behind some of them.

        The other axes are padded by 0: onnxruntime takes a Pad with ``axes`` behind a Transpose for another (`PADS_WITH_AXES`).
        """
        amounts: list[int | ir.Value] = [0] * (2 * rank)
        for axis, first, last in zip(axes, before, after, strict=True):
            amounts[axis % rank], amounts[axis % rank + rank] = first, last
        return self.Pad(x, amounts)

    def indices(self, x: ir.Value, axis: int) -> ir.Value:
        """0, 1, ... along an axis, as int64 vector: a constant where the dim is static."""
        length = self.dim(x, axis)
        if isinstance(length, int):
            return self.i64(list(range(length)))
        return self.Range(self.i64(0), self.Squeeze(length, [0]), self.i64(1))

    def rank(self, node: ir.Node, x: ir.Value) -> int:
        """The rank of an input or output of the node; the rules that ask for it cannot do without."""
        if x.shape is None:
            because, way = unknown_because(x, "shape")
            raise unsupported(node, f"the rank of {x.name!r} is not known{because}", f"{way[0].upper()}{way[1:]}")
        return len(x.shape)

    def rows(self, x: ir.Value, width: int | ir.Value) -> ir.Value:
        """All axes but the last, which has this width, as one."""
        if isinstance(width, int):
            return self.Reshape(x, [-1, width])
        return self.memo(("rows", x), lambda: self.Reshape(x, [-1, width]))

    def flat(self, x: ir.Value) -> ir.Value:
        """x as a vector."""
        return self.Reshape(x, [-1])

    def merged(self, x: ir.Value, start: int) -> ir.Value:
        """The axes from ``start`` on as one; of an x without elements as well, for which -1 says nothing."""
        if (dims := static_shape(x)) is not None:
            return (
                self.Reshape(x, [0] * start + [-1])
                if 0 not in dims
                else self.Reshape(x, [*dims[:start], math.prod(dims[start:])], allowzero=1)
            )
        size = self.Shape(x)
        last = self.ReduceProd(self.Shape(x, start=start), keepdims=1)
        merged = self.Reshape(x, self.Concat(self.Slice(size, [0], [start]), last, axis=0), allowzero=1)
        merged.shape = None if x.shape is None else ir.Shape([*x.shape[:start], None])
        return merged

    def reshape_like(self, x: ir.Value, like: ir.Value) -> ir.Value:
        """Reshape to the shape of ``like``."""
        dims = None if like.shape is None else [d if isinstance(d, int) else -1 for d in like.shape]
        if dims is not None and dims.count(-1) <= 1 and 0 not in dims:
            return self.Reshape(x, dims)
        return self.Reshape(x, self.Shape(like), allowzero=1)

    def matrix_of(self, x: ir.Value) -> ir.Value | None:
        """The matrix that x was reshaped from, where it was one."""
        maker = made_here(x, "Reshape")
        before = None if maker is None else maker.inputs[0]
        return before if len(static_shape(before) or ()) == 2 else None

    def move_last(self, x: ir.Value, axis: int, rank: int) -> ir.Value:
        """Transpose that swaps ``axis`` with the last one (its own inverse)."""
        perm = list(range(rank))
        perm[axis], perm[-1] = perm[-1], perm[axis]
        return self.Transpose(x, perm=perm)

    # ----------------------------------------------------------------------------------------------------- values
    def zeros(self, shape: ir.Value | Sequence[int], dtype: ir.DataType) -> ir.Value:
        """A tensor of zeros."""
        if dtype.is_floating_point() and dtype.bitwidth < 16:  # onnxruntime's ConstantOfShape makes none of those
            return self.Cast(self.zeros(shape, ir.DataType.FLOAT), to=dtype)
        return self.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, dtype.numpy()), dtype=dtype))

    def ones(self, shape: Sequence[int], dtype: ir.DataType) -> ir.Value:
        """A tensor of ones; a large one is made when the model runs, so that nothing of its size is made here."""
        if math.prod(shape) > MAX_UNROLLED:
            return self.Expand(self.constant(1.0, dtype), self.i64(list(shape)))
        return self.constant(np.ones(shape), dtype)

    def zeros_like(self, x: ir.Value) -> ir.Value:
        """Zeros of the shape and type of x, once per build."""
        zeros = self.memo(("zeros", x), lambda: self.zeros(self.Shape(x), dtype_of(x)))
        zeros.shape = x.shape
        return zeros

    def no_slope(self, x: ir.Value, *cotangents: ir.Value) -> ir.Value:
        """The gradient of x of what is constant in it: zeros, which are there only where one of the cotangents is.

        Each is a sum of no element of the cotangent: without it there is no gradient, not even of zeros.
        """
        nothing = [self.Cast(self.ReduceSum(self.Slice(self.flat(g), [0], [0]), keepdims=0), to=x.dtype) for g in cotangents]
        return self.expand_like(nothing[0] if len(nothing) == 1 else self.Sum(*nothing), x)

    def expand_like(self, x: ir.Value, like: ir.Value) -> ir.Value:
        """x broadcast to the shape of another value."""
        return self.Expand(x, self.Shape(like))

    def mask(self, condition: ir.Value, like: ir.Value) -> ir.Value:
        """A boolean as ones and zeros of the element type of ``like``."""
        return self.Cast(condition, to=like.dtype)

    def gate(self, condition: ir.Value, g: ir.Value) -> ir.Value:
        """g where the condition holds, zero elsewhere: also where g is infinite or NaN, which no product with zeros does."""
        return self.Where(condition, g, 0.0)

    def scale(self, x: ir.Value, factor: float) -> ir.Value:
        """x times a number; what is itself a new product with a number takes the product of both."""
        inner = made_here(x, "Mul")
        if inner is not None and x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            known = self.const(inner.inputs[1])
            if known is not None and known.ndim == 0:
                return self.Mul(inner.inputs[0], float(known) * factor)
        return self.Mul(x, factor)

    def count_over(self, x: ir.Value, axes: Sequence[int], like: ir.Value) -> float | ir.Value:
        """How many elements x has along the axes; a value is of the element type of ``like``, of float32 where that is a half type."""
        dims = [self.dim(x, a) for a in axes]
        known = [d for d in dims if isinstance(d, int)]
        if len(known) == len(dims):
            return float(np.prod(known))
        return self.as_count(self.ReduceProd(self.vector(dims), keepdims=0), like)

    def as_count(self, number: ir.Value, like: ir.Value) -> ir.Value:
        """A whole number as what a value of the type of ``like`` is divided by: a half type has few of them exactly, and float16 none above 65504."""
        return self.Cast(number, to=ir.DataType.FLOAT if like.dtype in HALVES else like.dtype)

    def shared(self, v: ir.Value, count: float | ir.Value) -> ir.Value:
        """v / count, in float32 where v is of a half type that may not have the count."""
        if v.dtype not in HALVES or (isinstance(count, float) and count <= _COUNTED):
            return self.Div(v, count)
        return self.Cast(self.Div(self.Cast(v, to=ir.DataType.FLOAT), count), to=v.dtype)

    def numbers(self, x: ir.Value) -> ir.Value:
        """The element numbers 0..n-1 in the shape of x: where a movement puts them is where the elements go."""
        dims = static_shape(x)
        if dims is not None and np.prod(dims) <= 4096:
            return self.i64(np.arange(int(np.prod(dims))).reshape(dims))
        return self.reshape_like(self.Range(self.i64(0), self.Size(x), self.i64(1)), x)

    def scatter_numbers(self, g: ir.Value, numbers: ir.Value, x: ir.Value, *, unique: bool = False) -> ir.Value:
        """Add the elements of g to those elements of a zero x whose numbers are given."""
        zeros = self.zeros(self.Reshape(self.Size(x), [1]), dtype_of(g))
        out = self.ScatterElements(zeros, self.flat(numbers), self.flat(g), axis=0, reduction=None if unique else "add")
        return self.reshape_like(out, x)

    # ------------------------------------------------------------------------------------------------------- sums
    def add_up(self, parts: Sequence[ir.Value], like: ir.Value) -> ir.Value:
        """The sum of values of the shape of ``like``; of what they were reshaped from, where one was one matrix."""
        matrix = next((static_shape(m) for p in parts if (m := self.matrix_of(p)) is not None), None)
        whole = static_shape(like)
        flat = matrix is not None and whole is not None and whole[-1:] == matrix[-1:] and np.prod(whole) == np.prod(matrix)
        if flat:
            parts = [self.Reshape(p, matrix) for p in parts]
        parts = joined(self, parts, like)
        total = parts[0] if len(parts) == 1 else self.Add(*parts) if len(parts) == 2 else self.Sum(*parts)
        total.shape = ir.Shape(matrix) if flat and matrix is not None else like.shape
        return self.Reshape(total, whole) if flat else total

    def sum_to(self, g: ir.Value, x: ir.Value, full: ir.Value | None = None, others: Sequence[ir.Value] = ()) -> ir.Value:
        """Sum g, which has the shape of ``full`` (default: its own), to the shape of x: the adjoint of broadcasting x.

        ``others`` are the operands with which x was broadcast; they may show that a symbolic dim was not stretched.
        """
        inner, outer = x.shape, (full or g).shape
        lead = None if inner is None or outer is None or len(outer) < len(inner) else len(outer) - len(inner)
        if inner is not None and outer is not None and lead is not None:
            verdicts = [_stretched(i, inner, outer, others) for i in range(len(inner))]
            if None not in verdicts:
                axes = [lead + i for i, stretched in enumerate(verdicts) if stretched]
                if lead and axes:  # leading axes go, the others stay as 1
                    g = self.ReduceSum(g, list(range(lead)) + axes, keepdims=0)
                    return self.reshape_like(g, x)
                if lead and not axes and all(d == 1 for d in outer[:lead]):
                    return self.reshape_like(g, x)
                if lead or axes:
                    return self.ReduceSum(g, list(range(lead)) or axes, keepdims=0 if lead else 1)
                return g
        padded = shape = self.Shape(x)
        if lead is None:
            missing = self.Sub(self.Size(self.Shape(full or g)), self.Size(shape))
            padded = self.Concat(self.Expand(self.i64([1]), self.Reshape(missing, [1])), shape, axis=0)
        elif lead:
            padded = self.Concat([1] * lead, shape, axis=0)
        axes = self.Reshape(self.NonZero(self.Equal(padded, 1)), [-1])
        return self.Reshape(self.ReduceSum(g, axes, keepdims=1, noop_with_empty_axes=1), shape, allowzero=1)


def _stretched(i: int, inner: ir.Shape, outer: ir.Shape, others: Sequence[ir.Value]) -> bool | None:
    """Whether axis i of the inner shape was stretched by broadcasting to the outer one; None where shapes do not tell."""
    mine, theirs = inner[i], outer[len(outer) - len(inner) + i]
    if isinstance(mine, int) and mine != 1:
        return False
    if isinstance(theirs, int) and (mine == 1 or theirs == 1):
        return theirs != 1
    if isinstance(mine, ir.SymbolicDim) and isinstance(theirs, ir.SymbolicDim) and mine.value is not None and mine.value == theirs.value:
        return False
    if mine == 1:
        return True  # the output may be 1 too: then the sum does nothing
    behind = len(inner) - i  # the axis counted from the end
    if others and all(o.shape is not None and (len(o.shape) < behind or o.shape[-behind] == 1) for o in others):
        return False
    return None
