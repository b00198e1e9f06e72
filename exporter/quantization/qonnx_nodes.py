"""QONNX's quantisers: what their nodes mean, in standard operators.

The definition is that of the QONNX project (docs/qonnx-custom-ops, ``qonnx.custom_op.general`` version 1): ``x / scale + zero_point`` is cut off at the ends of
so many bits, rounded, and turned back.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from symbolics.errors import FormatError
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import array_of, attr, describe
from symbolics.graph.walk import walk

__all__ = ["DOMAIN", "ends_of", "from_qonnx_nodes"]

#: The domain that is written; files of earlier tools name the others.
DOMAIN = "qonnx.custom_op.general"
_DOMAINS = (DOMAIN, "finn.custom_op.general", "onnx.brevitas")
_MOST_BITS = 24  # more are not whole in float32


def ends_of(bits: int, signed: bool, narrow: bool) -> tuple[int, int]:
    """The first and the last level of so many bits."""
    if signed:
        return -(1 << bits - 1) + narrow, (1 << bits - 1) - 1
    return 0, (1 << bits) - 1 - narrow


def from_qonnx_nodes(model: ir.Model) -> int:
    """Put standard operators in the place of Quant, IntQuant and BipolarQuant, in place.

    Returns:
        How many there were.

    Raises:
        FormatError: One is damaged, or of a kind that is not read: Trunc, FloatQuant.
    """
    nodes = [node for node in walk(model.graph) if node.domain in _DOMAINS]
    scope = Scope(free_prefix(model.graph, "qonnx/") if nodes else "", lambda value: False)
    for node in nodes:
        if len(node.inputs) != {"Quant": 4, "IntQuant": 4, "BipolarQuant": 2}.get(node.op_type) or None in node.inputs:
            raise FormatError(
                f"{describe(node)}: of QONNX's quantisers Quant and IntQuant with four inputs and BipolarQuant with two are read\n"
                "  way out: export the model without it, or in standard operators (brevitas: export_onnx_qcdq)"
            )
        if node.graph is not model.graph:
            raise FormatError(f"{describe(node)} stands in the body of a loop or a branch: it is read in the graph itself alone")
        op = Emitter(scope)
        replace(scope, node, op.nodes, [_bipolar(op, node) if node.op_type == "BipolarQuant" else _quant(op, node)])
    scope.register(model.graph)
    for domain in _DOMAINS if nodes else ():
        model.opset_imports.pop(domain, None)
    return len(nodes)


def _bipolar(op: Emitter, node: ir.Node) -> ir.Value:
    x, scale = node.inputs
    return op.Mul(op.Where(op.GreaterOrEqual(x, 0.0), 1.0, -1.0), scale)


def _quant(op: Emitter, node: ir.Node) -> ir.Value:
    x, scale, zero, _ = node.inputs
    bits = _bits(node)
    signed, narrow = bool(attr(node, "signed", 1)), bool(attr(node, "narrow", 0))
    held = array_of(zero)
    shifted = held is None or bool(held.any())
    q = op.Div(x, scale)
    q = op.Add(q, zero) if shifted else q
    if bits == 1 and signed:  # no levels would be left: the project's own implementation takes it for a bipolar one
        q = op.Where(op.GreaterOrEqual(q, 0.0), 1.0, -1.0)
    else:
        low, high = ends_of(bits, signed, narrow)
        q = _rounded(op, op.Clip(q, float(low), float(high)), node)
    return op.Mul(op.Sub(q, zero) if shifted else q, scale)


def _bits(node: ir.Node) -> int:
    array = array_of(node.inputs[3])
    if array is None or array.size != 1:
        raise FormatError(f"{describe(node)}: its bit width is no constant number, and the levels depend on it")
    bits = float(np.asarray(array, np.float64).reshape(()) if array.ndim == 0 else np.asarray(array, np.float64).reshape(-1)[0])
    if not math.isfinite(bits) or bits != round(bits) or not 1 <= bits <= _MOST_BITS:
        raise FormatError(f"{describe(node)}: its bit width is {bits:g}, and 1 to {_MOST_BITS} are read")
    return int(bits)


def _rounded(op: Emitter, q: ir.Value, node: ir.Node) -> ir.Value:
    mode = str(attr(node, "rounding_mode", "ROUND")).upper()
    if mode in ("ROUND", "HALF_EVEN"):
        return op.Round(q)
    if mode in ("CEIL", "FLOOR"):
        return op.node(mode.title(), [q])
    # The others are the same on both sides of 0.
    inside = {"UP": ("Ceil", 0.0), "DOWN": ("Floor", 0.0), "HALF_UP": ("Floor", 0.5), "HALF_DOWN": ("Ceil", -0.5)}.get(mode)
    if inside is None:
        raise FormatError(f"{describe(node)}: {mode[:40]!r} is no rounding mode of QONNX's")
    size = op.Abs(q)
    return op.Mul(op.Sign(q), op.node(inside[0], [op.Add(size, inside[1]) if inside[1] else size]))
