"""torchvision's roi_align: its backward gives the image a gradient, and the regions none."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.node.names import MARK_DOMAIN, MARK_OP
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "stop_at_regions"]

QUIRK = Quirk(
    upstream="onnxscript's torchlib",
    seen="0.7.2",
    wrong="torchvision's roi_align is written as RoiAlign, whose derivative goes to the regions as well; in eager mode none does",
)


def stop_at_regions(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Put a stop-gradient mark before the regions of each RoiAlign that torch's exporter has written."""
    changed = False
    for node in nodes:
        if node.op_type != "RoiAlign" or node.domain or node.graph is None or len(node.inputs) < 2 or (regions := node.inputs[1]) is None:
            continue
        mark = ir.Node(MARK_DOMAIN, MARK_OP, [regions], name=f"{node.name}/regions")
        out = mark.outputs[0]
        out.name, out.type, out.shape = f"{node.outputs[0].name}/regions", regions.type, regions.shape
        node.graph.insert_before(node, mark)
        node.replace_input_with(1, out)
        changed = True
    return changed
