"""Operators through which no gradient flows: sources, integer and boolean outputs, without a word; those that are flat give zeros; quantised ones are refused."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.errors import UnsupportedOperatorError
from symbolics.graph.values import RANDOM, unsupported
from symbolics.node.names import ORT_DOMAIN

__all__ = ["FLAT", "IN_INTEGERS", "MOVES", "NONDIFFERENTIABLE", "in_integers"]

_SOURCES = """
    Constant ConstantOfShape EyeLike Range BlackmanWindow HammingWindow HannWindow MelWeightMatrix ImageDecoder SequenceEmpty
"""
#: Float outputs of float inputs, constant almost everywhere: their gradient is zero, as torch's is, which is not the same as none.
FLAT = frozenset("Ceil Floor Round Sign Hardmax".split())
_INTEGER = """
    Shape Size NonZero ArgMax ArgMin NonMaxSuppression TfIdfVectorizer SequenceLength OptionalHasElement StringConcat
    StringNormalizer StringSplit RegexFullMatch BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor
"""
_BOOLEAN = "Equal Less LessOrEqual Greater GreaterOrEqual And Or Not Xor IsNaN IsInf"

NONDIFFERENTIABLE: frozenset[str] = frozenset(f"{_SOURCES} {_INTEGER} {_BOOLEAN}".split()) | RANDOM - {"Dropout"}

_QUANTISED = "ConvInteger MatMulInteger QLinearConv QLinearMatMul DynamicQuantizeLinear"
_QUANTISED_ORT = """
    DynamicQuantizeLSTM DynamicQuantizeMatMul MatMulInteger16 MatMulIntegerToFloat MulInteger ReduceSumInteger QAttention
    QEmbedLayerNormalization QGemm QLinearAdd QLinearAveragePool QLinearConcat QLinearConv QLinearGlobalAveragePool
    QLinearLeakyRelu QLinearMul QLinearReduceMean QLinearSigmoid QLinearSoftmax QLinearWhere QOrderedAttention QOrderedGelu
    QOrderedLayerNormalization QOrderedLongformerAttention QOrderedMatMul QuantizeLinear DequantizeLinear QuantizeBFP
    DequantizeBFP QuantizeWithOrder DequantizeWithOrder
"""
#: What computes with quantised numbers: (domain, operator). Their outputs stand for floats, whatever their type is: a gradient that
#: would pass is refused, never left out as that of an index is. (A DynamicQuantizeLinear is its body, which has a gradient.)
IN_INTEGERS: frozenset[tuple[str, str]] = frozenset(
    [*(("", name) for name in _QUANTISED.split()), *((ORT_DOMAIN, name) for name in _QUANTISED_ORT.split())]
)
#: What hands elements on as they are, so that a gradient passes it between QuantizeLinear and DequantizeLinear, too.
MOVES = frozenset("Identity Reshape Flatten Squeeze Unsqueeze Transpose Expand Concat Slice Tile SpaceToDepth DepthToSpace Cast".split())


def in_integers(node: ir.Node) -> UnsupportedOperatorError:
    """The error of a node that a gradient would have to pass in integers."""
    domain = f", domain={node.domain!r}" if node.domain else ""
    return unsupported(
        node,
        "it computes in integers, as a quantised file does, and no gradient passes there",
        "Differentiate the float file that was quantised, or quantise that one in the QDQ format, whose products are in float (onnxruntime's "
        f"quantize_static with QuantFormat.QDQ); or give a rule: @exporter.gradient({node.op_type!r}{domain}, straight_through=True)",
    )
