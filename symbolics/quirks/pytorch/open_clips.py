"""hardtanh and relu6: a Clip in the forward, but nothing flows at its bounds.

Both exporters write them as one node of our own while a model is optimized, so that no fusion takes it for a clamp. Then it is a Clip
with a property that the gradient rule of Clip reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from symbolics import torch_private as private
from symbolics.node.names import MARK_DOMAIN, OPEN_PROPERTY
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "SYMBOLICS", "hardtanh", "open_clips", "relu6"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="hardtanh and relu6 are written as the Clip of a clamp, through which a gradient flows at the bounds; theirs is 0 there",
)

_HARDTANH = "Hardtanh"


def hardtanh(x: ir.Value, min_val: float = -1.0, max_val: float = 1.0) -> ir.Value:
    """aten::hardtanh, for torch.onnx.export(dynamo=True)."""
    from symbolics.quirks.opset import number  # onnxscript: who only loads a file need not wait for it

    return private.add_traced_node(MARK_DOMAIN, _HARDTANH, [x, number(min_val, x), number(max_val, x)])[0]


def relu6(x: ir.Value) -> ir.Value:
    """aten::relu6, for the same."""
    return hardtanh(x, 0.0, 6.0)


def _number(g: Any, value: float, like: Any) -> Any:
    return g.op("Constant", value_t=torch.tensor(value, dtype=like.type().dtype() or torch.float32))


def _traced(original: Any, g: Any, x: Any, min_val: Any, max_val: Any) -> Any:
    low, high = (_number(g, private.torchscript_constant(bound), x) for bound in (min_val, max_val))
    return g.op(f"{MARK_DOMAIN}::{_HARDTANH}", x, low, high).setType(x.type())


def _traced_relu6(original: Any, g: Any, x: Any) -> Any:
    return g.op(f"{MARK_DOMAIN}::{_HARDTANH}", x, *(_number(g, bound, x) for bound in (0.0, 6.0))).setType(x.type())


#: The same for torch.onnx.export(dynamo=False).
SYMBOLICS: dict[str, Callable[..., Any]] = {"aten::hardtanh": _traced, "aten::relu6": _traced_relu6}


def open_clips(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Make each a Clip, whose bounds have no gradient."""
    for node in nodes:
        if node.domain == MARK_DOMAIN and node.op_type == _HARDTANH:
            node.domain, node.op_type = "", "Clip"
            node.metadata_props[OPEN_PROPERTY] = "1"
    return False
