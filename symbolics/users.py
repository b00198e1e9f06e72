"""Which code is the user's, and which is ours, torch's or Python's own: errors and warnings name his line."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from types import FrameType

from symbolics.errors import PythonopWarning

__all__ = ["TOOK", "is_users", "users_frame", "warn"]

#: What each warning says of a value that a trace keeps as it was at the example.
TOOK = "takes the value of a tensor out of torch"

#: Whose code is nobody's model, beside the standard library's.
_INNER = ("exporter", "symbolics", "torch", "functorch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "sympy", "mpmath", "numpy")

_STANDARD = os.path.dirname(os.__file__) + os.sep
_PACKAGES = tuple(os.path.join(_STANDARD, name) + os.sep for name in ("site-packages", "dist-packages"))


@functools.cache
def _places(_: int) -> tuple[str, ...]:
    """The folders of what is left out, of the packages that are there by now."""
    found = [sys.modules[name] for name in _INNER if name in sys.modules]
    return tuple(os.path.dirname(str(module.__file__)) + os.sep for module in found if getattr(module, "__file__", None))


def is_users(file: str) -> bool:
    """Whether code of a file is neither ours, nor torch's, onnx's or Python's own: a forward, or a library that knows nothing of an export."""
    if file.startswith("<"):  # made by torch or frozen, but for what somebody typed
        return file.startswith(("<stdin>", "<ipython", "<python-input", "<console>"))
    return not file.startswith(_places(sum(name in sys.modules for name in _INNER))) and (
        not file.startswith(_STANDARD) or file.startswith(_PACKAGES)
    )


def users_frame(frame: FrameType) -> FrameType:
    """The frame itself, or the first of those that called it, that runs the user's code; the outermost where none does."""
    while frame.f_back is not None and not is_users(frame.f_code.co_filename) and frame.f_globals.get("__name__") != "__main__":
        frame = frame.f_back
    return frame


def warn(message: str, category: type[Warning] = PythonopWarning) -> None:
    """Warn of something, at the user's line: in his forward where that runs, else where he called us.

    Args:
        message: The place, the cause and the way out.
        category: The class of the warning.
    """
    frame = users_frame(sys._getframe(1))
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__", "__main__")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, name, registry)
