"""Products of many matrices by the native library, where the processor has AVX-512.

The scores of an attention are such matrices. Of a causal one half are zeros, of one that sees a window nearly all; the native library leaves
them out where it finds them (native/batches.c), and multiplies others as quickly as onnxruntime.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from exporter.cpu.declared import forget
from exporter.cpu.operators import DOMAIN, has_wide_vectors
from exporter.runtime.facts import ShapeAndType, fact_of
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import attr, made_by

__all__ = ["BATCH_MATMUL", "multiply_batches"]

BATCH_MATMUL = "BatchMatMul"

_FEW_ELEMENTS, _FEW_ROWS = 2**17, 128  # of one of the matrices: of fewer, onnxruntime's product is quicker where there are no zeros
_MOST_COLUMNS = 256  # of the result, of which 32 are computed at once
_MOST_DIMS = 16  # as DIMS_MOST in native/tensors.c


def multiply_batches(model: ir.Model, facts: dict[ir.Value, ShapeAndType], sizes: Mapping[str, int] | None = None) -> int:
    """Replace MatMuls of large matrices, turned or not, with narrow ones in a model for onnxruntime's CPU with the native library.

    Args:
        model: Changed.
        facts: Shapes and element types of values that do not say it themselves; grows by those of what is put in. Sizes may be
            wrong: the native library works from the shapes of the matrices that it reads, as MatMul does.
        sizes: As `block_channels` has it.

    Returns:
        How many nodes were put in.
    """
    products = [node for node in model.graph if node.op_type == "MatMul" and node.domain == "" and _fits(node, facts, sizes or {})]
    if not products or not has_wide_vectors():
        return 0
    scope = Scope(free_prefix(model.graph, "batches/"), lambda value: False)
    for node in products:
        (left, right), op, shape = node.inputs, Emitter(scope), fact_of(node.outputs[0], facts)[0]
        turn = _turn(left)
        made = op.node(BATCH_MATMUL, [left if turn is None else turn.inputs[0], right], domain=DOMAIN, transposed=[int(turn is not None)])
        replace(scope, node, op.nodes, [made])
        facts[made], made.type = (shape, ir.DataType.FLOAT), ir.TensorType(ir.DataType.FLOAT)
        forget([made])
        if turn is not None and not turn.outputs[0].uses() and not turn.outputs[0].is_graph_output():
            model.graph.remove(turn, safe=True)
    model.graph.opset_imports[DOMAIN] = 1
    scope.register(model.graph)
    return len(products)


def _fits(node: ir.Node, facts: Mapping[ir.Value, ShapeAndType], sizes: Mapping[str, int]) -> bool:
    shapes = []
    for value in node.inputs:
        shape, kind = fact_of(value, facts) if value is not None and value.const_value is None else (None, None)
        if shape is None or kind is not ir.DataType.FLOAT or not 2 <= len(shape) <= _MOST_DIMS:
            return False
        shapes.append([dim if isinstance(dim, int) else sizes.get(dim, 0) for dim in shape])
    if len(shapes) != 2 or math.prod(shapes[0][:-2]) < 2:
        return False
    (*_, rows, depth), columns = shapes[0], shapes[1][-1]
    empty = -columns % 32
    return (
        min(rows, depth) >= _FEW_ROWS
        and rows * depth >= _FEW_ELEMENTS
        and columns <= min(_MOST_COLUMNS, depth - 1)
        and 8 * empty <= columns
    )


def _turn(value: ir.Value | None) -> ir.Node | None:
    """The Transpose of the last two axes that makes a value; None where none does."""
    turn = made_by(value, "Transpose")
    perm = None if turn is None else attr(turn, "perm", None)
    if not isinstance(perm, (list, tuple)) or len(perm) < 2:
        return None
    last = len(perm) - 1
    return turn if list(perm) == [*range(last - 1), last, last - 1] else None
