"""The exceptions of pythonop. Each message names the place, the cause and the way out."""

from __future__ import annotations

import contextlib
import functools
import pickle
from enum import StrEnum
from typing import Any, Self

from symbolics.text import causes, message

__all__ = [
    "ArgumentError",
    "ExportError",
    "Faq",
    "FormatError",
    "PythonopError",
    "PythonopWarning",
    "RunError",
    "TrustError",
    "UnsupportedOperatorError",
]


class Faq(StrEnum):
    """The sections of docs/faq.md that an error of ours leads to, by their anchors."""

    NOT_ALLOWED = "the-file-names-a-class-which-is-not-allowed"
    NOT_INSTALLED = "the-module-cannot-be-imported-here"
    IN_A_FUNCTION = "the-class-cannot-be-imported-in-another-process"
    CHANGED = "a-function-has-changed-since-the-file-was-exported"
    NO_PORTABLE_FORM = "an-argument-has-no-portable-form"
    PYTHON_VALUE = "the-function-returns-a-python-value-computed-from-its-inputs"
    CHANGED_IN_PLACE = "a-tensor-is-read-after-it-was-changed-in-place"
    FROM_A_SIZE = "an-argument-is-computed-from-a-dynamic-size"
    OTHER_SHAPE = "the-input-has-another-shape-than-the-model-takes"
    NOT_CARRIED = "a-forward-changes-what-a-training-step-cannot-carry"
    NO_NUMBER = "the-loss-is-no-single-number"
    NO_GRADIENT = "no-gradient-for-an-operator"
    NO_KERNEL = "onnxruntime-has-no-implementation-of-an-operator"


class PythonopError(Exception):
    """Base of every exception that pythonop raises on purpose.

    Its text has at most six lines (ten where it lists the ways out of an export that failed), without control characters,
    because much of it may come from a file. Where the documentation has more, Python prints a note below the text that says
    where.

    Attributes:
        whole: The whole error, as Python would have printed it, where Python prints only your own lines (`exporter.errors.full`):
            ``print(error.whole)``.
    """

    whole: object

    #: How many lines its text has at most.
    most_lines = 6

    def __init__(self, text: object = "", *, faq: Faq | None = None) -> None:
        Exception.__init__(
            self, message(str(text), self.most_lines)
        )  # not super(): it may be of a class of the user's, too, whose arguments nobody knows
        self._faq: Faq | None = None
        if faq is not None:
            self.lead_to(faq)

    def lead_to(self, faq: Faq) -> None:
        """Print where docs/faq.md has more of it below the text."""
        self._faq = faq
        self.add_note(f"more: docs/faq.md#{faq}")

    __str__ = Exception.__str__  # a KeyError's is another

    @property
    def faq(self) -> Faq | None:
        """The section of docs/faq.md about this error, or about the one that it was raised from. None where there is none."""
        return next((each._faq for each in causes(self) if isinstance(each, PythonopError) and each._faq is not None), None)

    def stand_alone(self) -> None:
        """Do not print the error that this one was raised from; it stays the ``__context__``. Its section of the FAQ is taken over."""
        if self._faq is None and (found := self.faq) is not None:
            self.lead_to(found)
        self.__context__ = self.__cause__ or self.__context__
        self.__cause__ = None

    def at(self, place: str) -> Self:
        """The same error, whose text begins with a place."""
        return type(self)(f"{place}: {self}", faq=self.faq)

    @classmethod
    def damaged(cls, place: str, what: str) -> Self:
        """The error for what pythonop would not have written.

        Args:
            place: The node, the attribute or the metadata key.
            what: What is wrong there.
        """
        return cls(f"{place}: {what}: the file is damaged")


def as_raised(error: BaseException, text: str, base: type[PythonopError]) -> PythonopError:
    """An error of ours for an exception that somebody may wait for: of `base`, and of that exception's own class, with its attributes.

    Args:
        error: The exception.
        text: What to say.
        base: The class of ours; the only one where the two cannot be one.
    """
    with contextlib.suppress(Exception):  # a class that nobody may derive from, or whose objects nobody may write to
        made = _restored(base, type(error), text)
        vars(made).update({name: value for name, value in vars(error).items() if name not in _OWN})
        return made
    return base(text)


_OWN = ("_faq", "whole", "__notes__")
_NEVER = (
    StopIteration,
    StopAsyncIteration,
    SyntaxError,
)  # a loop takes the first two for its end; of the last Python prints something else


@functools.lru_cache(maxsize=64)
def _as_well(base: type[PythonopError], kind: type[BaseException]) -> type[PythonopError]:
    if issubclass(base, kind) or not issubclass(kind, Exception) or issubclass(kind, _NEVER):
        return base

    def reduce(self: PythonopError) -> tuple[Any, ...]:
        try:
            pickle.dumps((kind, vars(self)))
        except Exception:
            return base, (str(self),), {name: value for name, value in vars(self).items() if name in _OWN}
        return _restored, (base, kind, str(self)), vars(self)

    bases = (kind,) if issubclass(kind, base) else (base, kind)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__, "__reduce__": reduce}
    return type(base.__name__, bases, names)


def _restored(base: type[PythonopError], kind: type[BaseException], text: str) -> PythonopError:
    return _as_well(base, kind)(text)  # type: ignore[arg-type]  # mypy finds no hash of a class


class ExportError(PythonopError):
    """A model, or a call of a Function in it, cannot be exported so that the file does what eager does.

    Attributes:
        operators: The calls of operators that it is about, where one PythonOp each is a way out: ``aten::name``, with its overload where
            it is known, as ``opaque=`` takes it.
    """

    operators: tuple[str, ...] = ()

    def at(self, place: str) -> Self:
        """The same error, whose text begins with a place."""
        error = super().at(place)
        error.operators = self.operators
        return error


class UnsupportedOperatorError(PythonopError, NotImplementedError):
    """An operator between ``wrt`` and the outputs has no gradient rule."""


class ArgumentError(PythonopError, ValueError):
    """An argument of a call has a value that it cannot have, or names what the model does not have: in ``wrt``, ``outputs``, ``inline``,
    ``dynamic_shapes``.
    """


class TrustError(PythonopError):
    """A file names a Python object that ``allow`` does not."""


class FormatError(PythonopError):
    """A file cannot be read, is damaged, or is not what docs/format.md describes."""


class RunError(PythonopError):
    """A model, or a node of it that calls Python, cannot be run."""


class PythonopWarning(UserWarning):
    """A warning of something that you should know before you trust the file. It says what to do."""
