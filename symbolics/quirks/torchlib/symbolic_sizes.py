"""Sizes that are computed with, for torch.onnx.export(dynamo=True) and for the bodies of portable Functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from symbolics.quirks.opset import op
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.torchlib.number_arithmetic import in_floats

__all__ = ["QUIRK", "symbolic_sizes"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="torch.onnx has no translation of sym_numel and sym_sqrt: x.numel() and math.sqrt(n) where a size is open",
)


def _number_of_elements(x: ir.Value) -> Any:
    return op.Size(x)


def _root(size: Any) -> Any:
    return op.Sqrt(in_floats(size))


def symbolic_sizes() -> dict[Any, Callable[..., Any]]:
    """For the ``custom_translation_table``."""
    return {torch.ops.aten.sym_numel.default: _number_of_elements, torch.sym_sqrt: _root}
