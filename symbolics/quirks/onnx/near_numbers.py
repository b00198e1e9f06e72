"""Sums with numbers near 0 and products with numbers near 1, in onnxscript's optimizer."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import onnx_ir as ir

from symbolics.graph.values import input_of
from symbolics.graph.walk import walk
from symbolics.quirks.hiding import hidden
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "near_numbers_apart"]

QUIRK = Quirk(
    upstream="onnxscript's optimizer",
    seen="0.7.2",
    wrong="x + 1e-8 and smaller is x, and so is x * 1.00001: a divisor loses the epsilon that keeps it from 0",
)

_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}


def near_numbers_apart(graph: ir.Graph) -> AbstractContextManager[None]:
    """While the block runs, these are no sums and products that the optimizer knows."""
    return hidden(graph, (node for node in walk(graph) if node.op_type in _NEUTRAL and not node.domain and _is_near(node)), "pythonop.near")


def _is_near(node: ir.Node) -> bool:
    neutral = _NEUTRAL[node.op_type]
    numbers = [number for value in node.inputs if (number := _number(value)) is not None]
    return any(number != neutral and math.isclose(number, neutral, rel_tol=1e-4, abs_tol=1e-7) for number in numbers)


def _number(value: ir.Value | None) -> float | None:
    """A constant number, also where it is cast."""
    while value is not None and (maker := value.producer()) is not None and maker.op_type in ("Cast", "CastLike", "Identity"):
        value = input_of(maker, 0)
    known = None if value is None else ir.convenience.get_const_tensor(value)
    if known is None or known.size != 1 or not known.dtype.is_floating_point():
        return None
    return float(known.numpy().reshape(()))
