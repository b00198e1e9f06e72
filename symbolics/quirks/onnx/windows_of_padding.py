"""Pools whose last window would start in the padding behind an axis, in the form that ONNX's inference counts right."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.graph.pool_sizes import POOLS, count_of_windows
from symbolics.graph.values import attr, input_of
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "without_windows_of_padding"]

QUIRK = Quirk(
    upstream="onnx",
    seen="1.23.2",
    wrong="the inference of shapes counts the window of a pool with ceil_mode that would start in the padding behind an axis: torch and "
    "onnxruntime have none there, onnx.checker refuses the right size, and onnxruntime makes a constant of the wrong one",
)


def without_windows_of_padding(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Give such pools, where their sizes are fixed, as much padding as their windows fill, and no ceil_mode."""
    for node in nodes:
        if node.op_type in POOLS and not node.domain and attr(node, "ceil_mode") and attr(node, "auto_pad") in (None, "", "NOTSET"):
            pads = _filled(node)
            if pads is not None:
                node.attributes["pads"] = ir.AttrInt64s("pads", pads)
                node.attributes.pop("ceil_mode")
    return False


def _filled(node: ir.Node) -> list[int] | None:
    """The padding with which the windows of a pool end where its axes do; None where ONNX counts right, or where there is none."""
    x, kernel = input_of(node, 0), attr(node, "kernel_shape")
    dims = [dim for dim in (() if x is None or x.shape is None else x.shape[2:]) if isinstance(dim, int)]
    if not dims or kernel is None or len(kernel) != len(dims) or x is None or len(x.shape or ()) != len(dims) + 2:
        return None
    n = len(dims)
    pads, steps, apart = (
        attr(node, name) or default for name, default in (("pads", [0] * 2 * n), ("strides", [1] * n), ("dilations", [1] * n))
    )
    if len(pads) != 2 * n or len(steps) != n or len(apart) != n or min(*steps, *apart) < 1:
        return None  # damaged
    with_border = node.op_type == "AveragePool" and bool(attr(node, "count_include_pad"))
    behind, too_many = list[int](), False
    for i, length in enumerate(dims):
        reach, before, border = apart[i] * (kernel[i] - 1) + 1, pads[i], pads[i + n]
        counted, count = count_of_windows(length, before, border, reach, steps[i])
        filled = max((count - 1) * steps[i] + reach - length - before, 0)
        if filled >= kernel[i] or (with_border and filled > border):  # the border would count for more than it does
            return None
        behind.append(filled)
        too_many = too_many or counted != count
    return [*pads[:n], *behind] if too_many else None
