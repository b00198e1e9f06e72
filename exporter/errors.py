"""What pythonop raises and warns of."""

from __future__ import annotations

from symbolics.errors import (
    ArgumentError,
    ExportError,
    FormatError,
    PythonopError,
    PythonopWarning,
    RunError,
    TrustError,
    UnsupportedOperatorError,
)

__all__ = [
    "ArgumentError",
    "ExportError",
    "FormatError",
    "PythonopError",
    "PythonopWarning",
    "RunError",
    "TrustError",
    "UnsupportedOperatorError",
]
