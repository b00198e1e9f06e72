"""Einsum whose operands have different numbers of axes under ``...``."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead

__all__ = ["ELLIPSES", "QUIRK"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="both exporters write an einsum as ONNX's, whose ellipses stand for equally many axes in all operands: torch broadcasts them. onnxruntime refuses the "
    "file, and with dynamo=False onnx's shape inference ends the process",
)


def _einsum(equation: Any, *operands: Any) -> Any:
    """The same of operands that have axes of size 1 in front of those under the ellipsis, where some have fewer than others."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "..." not in equation:
        return NotImplemented
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    if len(terms) != len(operands) or not all(isinstance(operand, torch.Tensor) for operand in operands):
        return NotImplemented
    under = [operand.dim() - len(term.replace("...", "")) if "..." in term else None for term, operand in zip(terms, operands)]
    known = [count for count in under if count is not None]
    if min(known) == max(known) or min(known) < 0:
        return NotImplemented
    widened = [
        operand if count is None else operand[(slice(None),) * term.index("...") + (None,) * (max(known) - count)]
        for term, operand, count in zip(terms, operands, under)
    ]
    return torch.einsum(equation, *widened)


ELLIPSES: dict[Any, Rewrite] = {torch.einsum: instead(_einsum)}
