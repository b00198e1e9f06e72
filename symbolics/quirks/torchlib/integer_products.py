"""Products of int8 matrices, which torchao's and others' int8 layers end in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk

__all__ = ["INTEGER_PRODUCTS", "QUIRK", "int_mm"]

QUIRK = Quirk(upstream="torch", seen="2.13", wrong="neither exporter has a translation of aten::_int_mm, which ONNX has as MatMulInteger")


def int_mm(self: ir.Value, mat2: ir.Value) -> Any:
    """aten::_int_mm."""
    from onnxscript import opset18 as op  # which who only loads a file need not wait for

    return op.MatMulInteger(self, mat2)  # type: ignore[type-var]


def _symbolic(g: Any, one: Any, two: Any) -> Any:
    return g.op("MatMulInteger", one, two).setType(private.tensor_type(torch.int32, [None, None]))


INTEGER_PRODUCTS: dict[str, Callable[..., Any]] = {"aten::_int_mm": _symbolic}
