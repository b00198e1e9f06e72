"""What rooms above the export add to a file that it has just finished."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

__all__ = ["ADDITIONS"]

#: Each gets the model before Functions become portable, and writes metadata alone; what it raises ends the export.
ADDITIONS: list[Callable[[ir.Model], None]] = []
