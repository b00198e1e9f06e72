"""Determinants of doubles, which onnxruntime has no kernel for."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from symbolics.graph.values import input_of
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "determinants_of_doubles"]

QUIRK = Quirk(
    upstream="onnxruntime", seen="1.32", wrong="its Det takes float32 alone: a model in float64 that has a determinant does not open"
)

_LARGEST = 5  # the products of all rows and columns are 120 for this one


def determinants_of_doubles(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Write out those of small matrices, row by row: the elements of the first one times their cofactors."""
    changed = False
    for node in nodes:
        if (node.domain, node.op_type) != ("", "Det") or node.graph is None or (x := input_of(node, 0)) is None:
            continue
        sizes = [] if x.shape is None else [size for size in x.shape[-2:] if isinstance(size, int)]
        if x.dtype is not ir.DataType.DOUBLE or x.shape is None or not sizes or not 1 <= sizes[0] <= _LARGEST:
            continue
        tape = ir.tape.Tape()
        inputs = [x if sizes[0] == 1 else _products(tape, x, list(x.shape[:-2]), sizes[0])]
        inputs.append(_integers(tape, [-2, -1] if sizes[0] == 1 else [-1]))
        for index, new in enumerate(tape.nodes):
            new.name = new.outputs[0].name = f"{node.outputs[0].name}/det{index}"
        node.graph.insert_before(node, tape.nodes)
        node.op_type = "Squeeze" if sizes[0] == 1 else "ReduceSum"
        node.resize_inputs(2)
        for index, value in enumerate(inputs):
            node.replace_input_with(index, value)
        if sizes[0] > 1:
            node.attributes.add(ir.AttrInt64("keepdims", 0))
        changed = True
    return changed


def _products(tape: ir.tape.Tape, x: ir.Value, batch: list[ir.SymbolicDim | int], size: int) -> ir.Value:
    """The elements of the first row of matrices, each times its cofactor."""
    rest = np.array([[j for j in range(size) if j != i] for i in range(size)])
    first = _take(tape, x, np.array(0), -2, [*batch, size])
    below = _take(tape, x, np.arange(1, size), -2, [*batch, size - 1, size])
    if size == 2:
        minors = _take(tape, below, np.array([1, 0]), -1, [*batch, 1, 2])
        cofactors = _made(tape, "Squeeze", [minors, _integers(tape, [-2])], [*batch, 2])
    else:
        rank, n = len(batch), size
        minors = _take(tape, below, rest, -1, [*batch, n - 1, n, n - 1])
        turned = _made(tape, "Transpose", [minors], [*batch, n, n - 1, n - 1], perm=[*range(rank), rank + 1, rank, rank + 2])
        inner = _products(tape, turned, [*batch, n], n - 1)
        cofactors = _made(tape, "ReduceSum", [inner, _integers(tape, [-1])], [*batch, n], keepdims=0)
    signs = tape.op("Constant", [], {"value": ir.tensor((-1.0) ** np.arange(size))})
    signs.type, signs.shape = ir.TensorType(ir.DataType.DOUBLE), ir.Shape([size])
    return _made(tape, "Mul", [_made(tape, "Mul", [first, signs], [*batch, size]), cofactors], [*batch, size])


def _take(tape: ir.tape.Tape, x: ir.Value, indices: np.ndarray, axis: int, shape: list[ir.SymbolicDim | int]) -> ir.Value:
    return _made(tape, "Gather", [x, _integers(tape, indices)], shape, axis=axis)


def _integers(tape: ir.tape.Tape, numbers: np.ndarray | list[int]) -> ir.Value:
    value = tape.op("Constant", [], {"value": ir.tensor(np.asarray(numbers, np.int64))})
    value.type, value.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(np.shape(numbers))
    return value


def _made(
    tape: ir.tape.Tape, op_type: str, inputs: list[ir.Value], shape: list[ir.SymbolicDim | int], **attributes: int | list[int]
) -> ir.Value:
    value = tape.op(op_type, inputs, attributes)
    value.type, value.shape = ir.TensorType(ir.DataType.DOUBLE), ir.Shape(shape)
    return value
