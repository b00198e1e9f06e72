"""Matrix products."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from symbolics.gradients.compositions import attention, swap
from symbolics.gradients.registry import Grads, gradient
from symbolics.graph.builder import Builder
from symbolics.graph.einsum import apart, axes_in_order, subscripts
from symbolics.graph.values import dtype_of, rank_of, static_shape

__all__: list[str] = []


@gradient("MatMul")
def matmul(op: Builder, g: Value, a: Value, b: Value, *, y: Value, node: ir.Node) -> Grads:
    """g B^T and A^T g, summed over the batch axes that were broadcast."""
    m, n = op.rank(node, a), op.rank(node, b)
    if m == 1 or n == 1:
        return _vector_matmul(op, a, b, m, n, g)
    if (whole := attention(op, node, g)) is not None:
        return whole
    da = op.MatMul(g, swap(op, b, n))
    if n == 2:  # a weight: one product over all rows instead of one per batch and their sum. A Transpose behind a Gemm is a flag of it
        rows, g_rows = (a, g) if m == 2 else (op.rows(a, op.dim(a, m - 1)), op.rows(g, op.dim(b, 1)))
        return [da, op.Gemm(rows, g_rows, transA=1)]
    db = op.MatMul(swap(op, a, m), g)
    return [op.sum_to(da, a, *_batched(a, b, y)), op.sum_to(db, b, *_batched(b, a, y))]


def _batched(x: Value, other: Value, y: Value) -> tuple[Value, list[Value]]:
    """Values whose shapes tell what broadcasting did to the batch axes of x: (result, other operands)."""
    if x.shape is None or y.shape is None:
        return Value(), []
    result = Value(shape=ir.Shape([*y.shape[:-2], *x.shape[-2:]]))
    return result, [] if other.shape is None else [Value(shape=ir.Shape([*other.shape[:-2], 1, 1]))]


def _vector_matmul(op: Builder, a: Value, b: Value, m: int, n: int, g: Value) -> Grads:
    if m == 1 and n == 1:
        return [g * b, g * a]
    if n == 1:  # (..., k) x (k): g has the shape (...)
        column = op.Unsqueeze(g, [-1])
        return [op.MatMul(column, op.Unsqueeze(b, [0])), op.ReduceSum(column * a, list(range(m - 1)), keepdims=0)]
    row = op.Unsqueeze(g, [-2])  # (k) x (..., k, n): g has the shape (..., n)
    da = op.ReduceSum(op.MatMul(row, swap(op, b, n)), list(range(n - 1)), keepdims=0)
    return [da, op.MatMul(op.Unsqueeze(a, [1]), row)]


@gradient("Gemm")
def gemm(
    op: Builder, g: Value, a: Value, b: Value, c: Value | None, *, y: Value, alpha: float, beta: float, transA: int, transB: int
) -> Grads:
    """alpha A B + beta C, of what may be transposed."""
    da = op.Gemm(b, g, alpha=alpha, transA=transB, transB=1) if transA else op.Gemm(g, b, alpha=alpha, transB=1 - transB)
    db = op.Gemm(g, a, alpha=alpha, transA=1, transB=transA) if transB else op.Gemm(a, g, alpha=alpha, transA=1 - transA)
    return [da, db, None if c is None else op.sum_to(g if beta == 1.0 else g * beta, c, y)]


@gradient("Einsum")
def einsum(op: Builder, g: Value, *xs: Value, node: ir.Node, equation: str) -> Grads:
    """The gradient of an operand is the einsum of the others and g to its subscripts."""
    equation = apart(equation, [x.shape for x in xs])
    given = [*equation.partition("->")[0].split(","), *[""] * len(xs)]
    ranks = [op.rank(node, x) if "..." in term else rank_of(x) for x, term in zip(xs, given)]
    terms, output = subscripts(node, ranks, equation)
    full: dict[str, Any] = {}  # letter -> dim, the largest where an operand has 1
    for x, term in zip(xs, terms):
        for letter, d in zip(term, x.shape or ()):
            if d != 1 or letter not in full:
                full[letter] = d
    free = iter(c for c in string.ascii_letters if c not in {*output, *"".join(terms)})
    out = []
    for i, (x, term) in enumerate(zip(xs, terms)):
        others = {letter for j, t in enumerate(terms) if j != i for letter in t}
        operands = [(g, output), *[(v, t) for j, (v, t) in enumerate(zip(xs, terms)) if j != i]]
        result = ""
        for k, letter in enumerate(term):
            if letter in result:  # a diagonal: a fresh letter, tied to the first by the identity matrix
                fresh = next(free)
                eye = op.EyeLike(op.zeros(op.vector([op.dim(x, k)] * 2), dtype_of(g)), dtype=g.dtype)
                operands.append((eye, letter + fresh))
                letter = fresh
            elif all(letter not in t for _, t in operands):  # summed within this operand alone
                operands.append((op.Expand(op.number(1.0, g), op.vector([op.dim(x, k)])), letter))
            result += letter
        operands = _in_order(op, operands)
        dx = op.Einsum(*[v for v, _ in operands], equation=",".join(t for _, t in operands) + "->" + result)
        # An axis that no other operand has was not stretched.
        alone = [None if letter in others else 1 for letter in term]
        evidence = [Value(shape=ir.Shape(alone))] if 1 in alone else []
        out.append(op.sum_to(dx, x, Value(shape=ir.Shape([full[letter] for letter in term])), evidence))
    return out


def _in_order(op: Builder, operands: Sequence[tuple[Value, str]]) -> list[tuple[Value, str]]:
    """The operands with their axes in the order in which the letters come first; those that surely have elements stay.

    onnxruntime transposes the others itself, and ends the process where one of them has no element (`symbolics.quirks.onnxruntime.empty_einsums`).
    """
    out = []
    for (x, term), axes in zip(operands, axes_in_order([term for _, term in operands])):
        turns = axes != sorted(axes) and 0 in (static_shape(x) or (0,))
        out.append((op.Transpose(x, perm=axes), "".join(term[axis] for axis in axes)) if turns else (x, term))
    return out
