"""Scatters that TorchScript writes without their reduction, or with a shape that they do not have."""

from __future__ import annotations

from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.errors import ExportError
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "index_put", "scatter_reduce"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript's index_put(accumulate=True) keeps one of the values that go to one place; its scatter_reduce declares the number of "
    "elements for the shape",
)

_REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}


def index_put(original: Any, g: Any, x: Any, indices: Any, values: Any, accumulate: Any = False) -> Any:
    """aten::index_put: one scatter, that adds."""
    add = accumulate if isinstance(accumulate, bool) else bool(private.torchscript_constant(accumulate))
    result = original(g, x, indices, values, False)
    if add:
        if result.node().kind() != "onnx::ScatterND":
            raise ExportError(
                "index_put(accumulate=True) with a mask has no translation to ONNX by the TorchScript exporter: use dynamo=True, or add "
                "torch.where(mask, ...)"
            )
        result.node().s_("reduction", "add")
    return result


def scatter_reduce(original: Any, g: Any, x: Any, dim: Any, index: Any, src: Any, reduce: Any, include_self: Any) -> Any:
    """aten::scatter_reduce.two, of tensors with dimensions, of whatever sizes."""
    how, dtype = _REDUCTIONS.get(private.torchscript_constant(reduce)), x.type().dtype()
    if how is None or dtype is None or not all(value.type().dim() for value in (x, index, src)):
        return original(g, x, dim, index, src, reduce, include_self)
    axis, target = private.torchscript_constant(dim), x
    if not private.torchscript_constant(include_self):  # what is written to begins with what changes no result
        least = torch.iinfo(dtype) if not dtype.is_floating_point else None
        nothing = {
            "add": 0,
            "mul": 1,
            "max": -float("inf") if least is None else least.min,
            "min": float("inf") if least is None else least.max,
        }
        first = g.op("ConstantOfShape", g.op("Shape", index), value_t=torch.tensor([nothing[how]], dtype=dtype))
        target = g.op("ScatterElements", x, index, first, axis_i=axis).setType(x.type())
    return g.op("ScatterElements", target, index, src, axis_i=axis, reduction_s=how).setType(x.type())
