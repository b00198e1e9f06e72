"""Operators through which no gradient flows, without a word: sources, integer and boolean outputs. Those that are flat give zeros."""

from __future__ import annotations

from symbolics.graph.values import RANDOM

__all__ = ["FLAT", "NONDIFFERENTIABLE"]

_SOURCES = """
    Constant ConstantOfShape EyeLike Range BlackmanWindow HammingWindow HannWindow MelWeightMatrix ImageDecoder SequenceEmpty
"""
#: Float outputs of float inputs, constant almost everywhere: their gradient is zero, as torch's is, which is not the same as none.
FLAT = frozenset("Ceil Floor Round Sign Hardmax".split())
_INTEGER = """
    Shape Size NonZero ArgMax ArgMin NonMaxSuppression TfIdfVectorizer SequenceLength OptionalHasElement StringConcat
    StringNormalizer StringSplit RegexFullMatch ConvInteger MatMulInteger QLinearConv QLinearMatMul BitCast
    BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor
"""
_BOOLEAN = "Equal Less LessOrEqual Greater GreaterOrEqual And Or Not Xor IsNaN IsInf"

NONDIFFERENTIABLE: frozenset[str] = frozenset(f"{_SOURCES} {_INTEGER} {_BOOLEAN}".split()) | RANDOM - {"Dropout"}
