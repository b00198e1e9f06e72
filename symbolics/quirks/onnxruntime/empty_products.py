"""Products of matrices over nothing."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import in_place, instead

__all__ = ["EMPTY_PRODUCTS", "QUIRK", "products_of_nothing"]

QUIRK = Quirk(
    upstream="onnxruntime",
    seen="1.31.1",
    wrong="Gemm over matrices without columns drops beta; MatMul does not broadcast to a batch without elements, nor does the FusedMatMul that it "
    "becomes behind a Transpose, which may end the process",
)


def _addmm(x: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    """beta x; the product is a sum of nothing."""
    if mat1.shape[1] != 0 or beta == 1:
        return NotImplemented
    return x * beta + torch.mm(mat1, mat2)


_INSTEAD = instead(_addmm)
EMPTY_PRODUCTS = {torch.addmm: _INSTEAD, torch.Tensor.addmm: _INSTEAD, torch.Tensor.addmm_: in_place(_INSTEAD, torch.addmm)}


def products_of_nothing(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Write MatMul(A, B), of which one is known to have no element, as the sum over products of elements: there are none."""
    changed = False
    for node in nodes:
        if (node.domain, node.op_type) != ("", "MatMul") or node.graph is None or len(node.inputs) != 2:
            continue
        a, b = node.inputs
        if a is None or b is None or a.shape is None or b.shape is None or 0 not in (*a.shape, *b.shape):
            continue
        vectors = len(a.shape) == 1, len(b.shape) == 1
        tape = ir.tape.Tape()

        def along(axis: int, tape: ir.tape.Tape = tape) -> ir.Value:
            return tape.op("Constant", [], {"value": ir.tensor(np.array([axis], np.int64))})

        # (..., m, k, 1) and (..., 1, k, n); a vector has no m, or no n.
        left = a if vectors[1] else tape.op("Unsqueeze", [a, along(len(a.shape))])
        right = b if any(vectors) else tape.op("Unsqueeze", [b, along(len(b.shape) - 2)])
        products = tape.op("Mul", [left, right])
        rank = len(a.shape) if vectors[1] else len(b.shape) if vectors[0] else max(len(a.shape), len(b.shape)) + 1
        k = along(rank - (1 if vectors[1] else 2))
        for number, new in enumerate(tape.nodes):
            new.name = new.outputs[0].name = f"{node.outputs[0].name}/product_{number}"
            new.outputs[0].type = ir.TensorType(ir.DataType.INT64) if new.op_type == "Constant" else a.type
        node.graph.insert_before(node, tape.nodes)
        node.op_type = "ReduceSum"
        node.attributes["keepdims"] = ir.AttrInt64("keepdims", 0)
        node.replace_input_with(0, products)
        node.replace_input_with(1, k)
        changed = True
    return changed
