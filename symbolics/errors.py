"""The exceptions of pythonop. Each message names the place, the cause and the way out."""

from __future__ import annotations

from typing import Self

from symbolics.text import message

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


class PythonopError(Exception):
    """Base of every exception that pythonop raises on purpose.

    Its text has at most six lines and 1,800 characters, and no control characters: much of it may come from a file.
    """

    def __init__(self, text: object = "") -> None:
        super().__init__(message(str(text)))

    @classmethod
    def damaged(cls, place: str, what: str) -> Self:
        """The error for what pythonop would not have written.

        Args:
            place: The node, the attribute or the metadata key.
            what: What is wrong there.
        """
        return cls(f"{place}: {what}: the file is damaged")


class ExportError(PythonopError):
    """A model, or one call of a Function in it, cannot be exported faithfully."""


class UnsupportedOperatorError(PythonopError, NotImplementedError):
    """An operator on a path from ``wrt`` to the outputs has no gradient rule."""


class ArgumentError(PythonopError, ValueError):
    """``wrt``, ``outputs`` or ``inline`` names what the model does not have, or ``wrt`` what has no gradient."""


class TrustError(PythonopError):
    """A file names a Python object that the caller did not allow."""


class FormatError(PythonopError):
    """A file, a node or a ``call`` attribute is not what docs/format.md says."""


class RunError(PythonopError):
    """A PythonOp or PythonOpGrad cannot be run as the file asks."""


class PythonopWarning(UserWarning):
    """Something that a user should know before trusting the file; it names the remedy."""
