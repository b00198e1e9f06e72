"""Types and ranks of what onnxruntime's quantised operators give out: ONNX infers nothing of them, and a model behind them needs both."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from symbolics.graph.values import input_of, rank_of
from symbolics.node.limits import MAX_RANK
from symbolics.node.names import ORT_DOMAIN

__all__ = ["fill_in", "is_quantised", "product_rank"]

#: Operator -> the inputs of which the one of most axes has the rank of the output, and the input that has its type.
_ELEMENTS: dict[str, tuple[tuple[int, ...], int]] = {
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), ((0, 3), 0)),
    **dict.fromkeys(
        "QLinearAveragePool QLinearConv QLinearGlobalAveragePool QLinearLeakyRelu QLinearSigmoid QLinearSoftmax".split(), ((0,), 0)
    ),
    "QLinearConcat": ((2,), 2),
    "QuantizeLinear": ((0,), 2),
    "DequantizeLinear": ((0,), 1),
    "QAttention": ((0,), 3),
}
#: Operator -> the two factors, and the input that has the type.
_PRODUCTS = {"MatMulIntegerToFloat": (0, 1, 2), "DynamicQuantizeMatMul": (0, 1, 0), "QGemm": (0, 3, 8)}
_IF_LEFT_OUT = {"QuantizeLinear": ir.DataType.UINT8, "QGemm": ir.DataType.FLOAT}


def is_quantised(node: ir.Node) -> bool:
    """Whether `fill_in` knows a node."""
    return node.domain == ORT_DOMAIN and (node.op_type in _ELEMENTS or node.op_type in _PRODUCTS)


def fill_in(node: ir.Node) -> bool:
    """Give the first output its type and rank, where they are not known and follow from the inputs; whether there was anything to give."""
    if not is_quantised(node) or not node.outputs:
        return False
    output = node.outputs[0]
    if node.op_type in _PRODUCTS:
        one, other, typed = _PRODUCTS[node.op_type]
        rank = product_rank([input_of(node, one)], [input_of(node, other)])
    else:
        places, typed = _ELEMENTS[node.op_type]
        ranks = [rank_of(input_of(node, place)) for place in places]
        known = [rank for rank in ranks if rank is not None]
        rank = max(known) if len(known) == len(ranks) else None
    before = output.type, output.shape
    if output.type is None:
        given = input_of(node, typed)
        dtype = _IF_LEFT_OUT.get(node.op_type) if given is None else given.dtype
        output.type = None if dtype is None else ir.TensorType(dtype)
    if output.shape is None and rank is not None and rank <= MAX_RANK:
        output.shape = ir.Shape([None] * rank)
    return before != (output.type, output.shape)


def product_rank(one: Sequence[ir.Value | None], other: Sequence[ir.Value | None]) -> int | None:
    """The rank of a product of matrices or stacks of them, None where it is not known."""
    ranks = [rank_of(value) for value in (*one, *other)]
    known = [rank for rank in ranks if rank is not None and rank >= 2]
    return max(known) if len(known) == 2 else None
