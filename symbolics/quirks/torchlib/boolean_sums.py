"""Sums of booleans, as masks that are added: ``(x < low) + (x > high)``."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "sums_of_booleans"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="torch.onnx.export(dynamo=True) writes an Add of two booleans, which ONNX has not: torch gives whether one of them is true",
)


def sums_of_booleans(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Write Or in their place."""
    for node in nodes:
        if (node.domain, node.op_type) == ("", "Add") and any(
            value is not None and value.dtype is ir.DataType.BOOL for value in node.inputs
        ):
            node.op_type = "Or"
    return False
