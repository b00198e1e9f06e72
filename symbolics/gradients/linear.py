"""Matrix products."""

from __future__ import annotations

import string

import onnx_ir as ir

from symbolics.gradients.compositions import attention, swap
from symbolics.gradients.registry import gradient
from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, unsupported

__all__: list[str] = []


def _rows(op: Builder, x: ir.Value) -> ir.Value:
    """All axes but the last as one."""
    return op.rows(x, op.dim(x, len(x.shape) - 1))


@gradient("MatMul")
def matmul(op, node, g):
    a, b = node.inputs
    m, n = op.rank(node, a), op.rank(node, b)
    if m == 1 or n == 1:
        return _vector_matmul(op, a, b, m, n, g)
    if (whole := attention(op, node, g)) is not None:
        return whole
    da = op.MatMul(g, swap(op, b, n))
    if m > 2 and n == 2:  # a weight: one product over all rows instead of one a batch and their sum
        return [da, op.Gemm(_rows(op, a), op.rows(g, op.dim(b, 1)), transA=1)]
    db = op.MatMul(swap(op, a, m), g)
    return [op.sum_to(da, a, *_batched(node, a)), op.sum_to(db, b, *_batched(node, b))]


def _batched(node: ir.Node, x: ir.Value) -> tuple[ir.Value, list[ir.Value]]:
    """Values whose shapes tell what broadcasting did to the batch axes of x: (result, other operands)."""
    y = node.outputs[0]
    if x.shape is None or y.shape is None:
        return ir.Value(), []
    shape = ir.Shape([*list(y.shape)[:-2], *list(x.shape)[-2:]])
    other = node.inputs[1 - node.inputs.index(x)]
    if other.shape is None:
        return ir.Value(shape=shape), []
    return ir.Value(shape=shape), [ir.Value(shape=ir.Shape([*list(other.shape)[:-2], 1, 1]))]


def _vector_matmul(op: Builder, a: ir.Value, b: ir.Value, m: int, n: int, g: ir.Value) -> list[ir.Value]:
    if m == 1 and n == 1:
        return [g * b, g * a]
    if n == 1:  # (..., k) x (k): g has the shape (...)
        column = op.Unsqueeze(g, [-1])
        return [op.MatMul(column, op.Unsqueeze(b, [0])), op.ReduceSum(column * a, list(range(m - 1)), keepdims=0)]
    row = op.Unsqueeze(g, [-2])  # (k) x (..., k, n): g has the shape (..., n)
    da = op.ReduceSum(op.MatMul(row, swap(op, b, n)), list(range(n - 1)), keepdims=0)
    return [da, op.MatMul(op.Unsqueeze(a, [1]), row)]


@gradient("Gemm")
def gemm(op, node, g):
    a, b, c = [*node.inputs, None][:3]
    ta, tb = attr(node, "transA", 0), attr(node, "transB", 0)
    alpha, beta = attr(node, "alpha", 1.0), attr(node, "beta", 1.0)
    da = op.Gemm(b, g, alpha=alpha, transA=tb, transB=1) if ta else op.Gemm(g, b, alpha=alpha, transB=1 - tb)
    db = op.Gemm(g, a, alpha=alpha, transA=1, transB=ta) if tb else op.Gemm(a, g, alpha=alpha, transA=1 - ta)
    dc = None if c is None else op.sum_to(g if beta == 1.0 else g * beta, c, node.outputs[0])
    return [da, db, dc][: len(node.inputs)]


@gradient("Einsum")
def einsum(op, node, g):
    """The gradient of an operand is the einsum of the others and g to its subscripts."""
    terms, output = _subscripts(op, node)
    full = {}  # letter -> dim, the largest where an operand has 1
    for x, term in zip(node.inputs, terms):
        for letter, d in zip(term, x.shape):
            if d != 1 or letter not in full:
                full[letter] = d
    free = iter(c for c in string.ascii_letters if c not in {*output, *"".join(terms)})
    out = []
    for i, (x, term) in enumerate(zip(node.inputs, terms)):
        operands = [(g, output)] + [(v, t) for j, (v, t) in enumerate(zip(node.inputs, terms)) if j != i]
        result = ""
        for k, letter in enumerate(term):
            if letter in result:  # a diagonal: a fresh letter, tied to the first by the identity matrix
                fresh = next(free)
                eye = op.EyeLike(op.zeros(op.vector([op.dim(x, k)] * 2), g.dtype), dtype=g.dtype)
                operands.append((eye, letter + fresh))
                letter = fresh
            elif all(letter not in t for _, t in operands):  # summed within this operand alone
                operands.append((op.Expand(op.number(1.0, g), op.vector([op.dim(x, k)])), letter))
            result += letter
        equation = ",".join(t for _, t in operands) + "->" + result
        whole = ir.Value(shape=ir.Shape([full[letter] for letter in term]))
        out.append(op.sum_to(op.Einsum(*[v for v, _ in operands], equation=equation), x, whole, _ones(node, terms, i, term)))
    return out


def _ones(node: ir.Node, terms: list[str], i: int, term: str) -> list[ir.Value]:
    """Evidence for sum_to: each axis that no other operand has was not stretched."""
    others = {letter for j, t in enumerate(terms) if j != i for letter in t}
    dims = [None if letter in others else 1 for letter in term]
    return [ir.Value(shape=ir.Shape(dims))] if 1 in dims else []


def _subscripts(op: Builder, node: ir.Node) -> tuple[list[str], str]:
    """Subscripts of the operands and of the output, letters for the ellipsis, the output explicit."""
    equation = attr(node, "equation").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    free = [c for c in string.ascii_letters if c not in equation]
    widths = [op.rank(node, x) - len(t.replace("...", "")) if "..." in t else 0 for x, t in zip(node.inputs, terms)]
    if min(widths) < 0:
        raise unsupported(node, f"the equation {equation!r} does not fit the ranks of the inputs")
    ellipsis = "".join(free[: max(widths)])
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        right = "..." + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    terms = [t.replace("...", ellipsis[len(ellipsis) - w :]) for t, w in zip(terms, widths)]
    return terms, right.replace("...", ellipsis)
