"""Operators through which no gradient flows, without a word: sources, integer and boolean outputs, functions that are flat."""

from __future__ import annotations

from symbolics.graph.values import RANDOM

__all__ = ["FLAT", "NONDIFFERENTIABLE"]

_SOURCES = """
    Constant ConstantOfShape EyeLike Range BlackmanWindow HammingWindow HannWindow MelWeightMatrix ImageDecoder SequenceEmpty
"""
#: They have float outputs of float inputs, and no gradient.
FLAT = frozenset("Ceil Floor Round Sign Hardmax BitCast".split())
_INTEGER = """
    Shape Size NonZero ArgMax ArgMin NonMaxSuppression TfIdfVectorizer SequenceLength OptionalHasElement StringConcat
    StringNormalizer StringSplit RegexFullMatch ConvInteger MatMulInteger QLinearConv QLinearMatMul
    BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor
"""
_BOOLEAN = "Equal Less LessOrEqual Greater GreaterOrEqual And Or Not Xor IsNaN IsInf"

NONDIFFERENTIABLE: frozenset[str] = frozenset(f"{_SOURCES} {_INTEGER} {_BOOLEAN}".split()) | FLAT | RANDOM - {"Dropout"}
