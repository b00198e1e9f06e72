"""pythonop: PyTorch models with custom autograd Functions as ONNX, with their gradients.

Names are loaded on first use, so that tools that need no torch (gradients, inspect) do not load it.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exporter import testing as testing
    from exporter.case import Case as Case
    from exporter.check_gradients import check_gradients as check_gradients
    from exporter.export import export as export
    from exporter.gradient_graph import build_gradient_graph as build_gradient_graph
    from exporter.hook import hook as hook, install as install, uninstall as uninstall
    from exporter.module import load as load
    from exporter.program import Program as Program
    from exporter.runtime.reference import reference_evaluator as reference_evaluator
    from exporter.runtime.session import inference_session as inference_session, session_options as session_options
    from exporter.training_step import TrainingStep as TrainingStep, export_training_step as export_training_step
    from exporter.trust import register as register
    from exporter.verify import verify as verify
    from symbolics.errors import (
        ArgumentError as ArgumentError,
        ExportError as ExportError,
        FormatError as FormatError,
        PythonopError as PythonopError,
        PythonopWarning as PythonopWarning,
        RunError as RunError,
        TrustError as TrustError,
        UnsupportedOperatorError as UnsupportedOperatorError,
    )
    from symbolics.gradients import gradient as gradient

__version__ = "0.1.0"

_WHERE = {
    "export": "exporter.export",
    "export_training_step": "exporter.training_step",
    "TrainingStep": "exporter.training_step",
    "load": "exporter.module",
    "hook": "exporter.hook",
    "install": "exporter.hook",
    "uninstall": "exporter.hook",
    "Program": "exporter.program",
    "Case": "exporter.case",
    "register": "exporter.trust",
    "verify": "exporter.verify",
    "build_gradient_graph": "exporter.gradient_graph",
    "check_gradients": "exporter.check_gradients",
    "gradient": "symbolics.gradients",
    "inference_session": "exporter.runtime.session",
    "session_options": "exporter.runtime.session",
    "reference_evaluator": "exporter.runtime.reference",
    "ArgumentError": "symbolics.errors",
    "ExportError": "symbolics.errors",
    "FormatError": "symbolics.errors",
    "PythonopError": "symbolics.errors",
    "PythonopWarning": "symbolics.errors",
    "RunError": "symbolics.errors",
    "TrustError": "symbolics.errors",
    "UnsupportedOperatorError": "symbolics.errors",
}

_MODULES = ("testing",)

__all__ = sorted([*_WHERE, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"exporter.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'exporter' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    setattr(sys.modules[__name__], name, value)
    return value


class _Package(types.ModuleType):
    """hook, export and verify name a function and the module that holds it: the attribute is the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _WHERE and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return __all__
