"""What pythonop raises and warns of, and how much of the way there a traceback shows.

An error that leaves a public function shows the frames of the user's own code alone: where he called, and where in his forward it happened. `full`
shows all of them, and what the error was raised from.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from symbolics import errors
from symbolics.errors import *  # noqa: F403
from symbolics.errors import PythonopError
from symbolics.text import printable, said
from symbolics.users import is_users

__all__ = ["Whole", "frames_behind", "full", "is_full", "is_users", "short", "short_block", "shorten", *errors.__all__]

P = ParamSpec("P")
R = TypeVar("R")

#: Set to anything but 0, it is as `full` for the whole process.
VARIABLE = "PYTHONOP_TRACEBACK"

#: Frames of the user's code inside of a call of ours: more are the way through a large library, and the last say the most.
_MOST = 4

_full = 0


class _Thread(threading.local):
    depth = 0


_thread = _Thread()


@contextlib.contextmanager
def full() -> Iterator[None]:
    """Show errors whole in this block: all frames, the errors behind them, and what torch prints when it fails.

    The environment variable ``PYTHONOP_TRACEBACK=1`` does so for a process. For an error that you caught, ``print(error.whole)``
    shows the same.

    Examples:
        >>> with exporter.errors.full():
        ...     program = exporter.export(model, (x,))
    """
    global _full
    _full += 1
    try:
        yield
    finally:
        _full -= 1


def is_full() -> bool:
    """Whether errors are shown whole now."""
    return _full > 0 or os.environ.get(VARIABLE, "") not in ("", "0")


@dataclass(frozen=True)
class Whole:
    """What Python would have printed of an error that is now short; its text is made when it is asked for."""

    error: BaseException
    traceback: TracebackType | None
    cause: BaseException | None
    context: BaseException | None

    def __str__(self) -> str:
        behind = self.cause if self.cause is not None else self.context
        lines = traceback.format_exception(type(behind), behind, behind.__traceback__) if behind is not None else []
        if behind is not None:
            link = "the direct cause of the following exception" if self.cause is not None else "what the following exception came of"
            lines.append(f"\nThe above exception was {link}:\n\n")
        lines += ["Traceback (most recent call last):\n", *traceback.format_tb(self.traceback)]
        return printable("".join([*lines, *traceback.format_exception_only(self.error)]))

    __repr__ = __str__

    def __reduce__(self) -> tuple[Any, ...]:  # frames cannot be pickled, and errors cross processes
        return str, (str(self),)


def _steps(tb: TracebackType | None) -> list[TracebackType]:
    found = []
    while tb is not None:
        found.append(tb)
        tb = tb.tb_next
    return found


def _behind(error: BaseException) -> list[BaseException]:
    """An error, and what it was raised from."""
    found: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and not any(step is one for one in found):
        found.append(step)
        step = step.__cause__ if step.__cause__ is not None or step.__suppress_context__ else step.__context__
    return found


def _way(error: BaseException) -> list[TracebackType]:
    """The steps on the way to an error, the innermost last; behind them those on the way to what it was raised from."""
    found: dict[tuple[int, int], TracebackType] = {}
    for one in _behind(error):
        found.update(((id(step.tb_frame), step.tb_lasti), step) for step in _steps(one.__traceback__))
    return list(found.values())


def frames_behind(error: BaseException) -> list[tuple[FrameType, int]]:
    """The frames on the way to an error and to what it was raised from, the innermost last, each with its line."""
    return [(step.tb_frame, step.tb_lineno) for step in _way(error)]


def shorten(error: BaseException) -> None:
    """Leave of an error's traceback the steps of the user's code; ``error.whole`` keeps all of it.

    An error of ours says what it was raised from: that is not printed again, but for the user's steps on the way to it. Any other is the user's,
    as is what he raised it from; its last step stays, as it may be a fault of ours. Inside of another public function nothing happens: the
    error is shortened where that is left.
    """
    if is_full() and isinstance(error, PythonopError):
        _tidy(error)
    if is_full() or _thread.depth:
        return
    with contextlib.suppress(Exception):  # an error may be of a class that lets nobody write to it
        steps, most = _way(error), _MOST
        if hasattr(error, "whole"):  # it came through a call of ours before, and what is new is the user's way there
            most = len(steps)
        else:
            context = None if error.__suppress_context__ else error.__context__
            error.whole = Whole(error, error.__traceback__, error.__cause__, context)  # type: ignore[attr-defined]
            if not all(_is_ours(step) or _is_users(step) for step in steps):
                error.add_note(f"the whole way there: print(error.whole), or {VARIABLE}=1")
        if isinstance(error, PythonopError):
            error.stand_alone()
            error.__traceback__ = _linked([step for step in steps if _is_users(step)][-most:])
        else:
            own = _steps(error.__traceback__)
            error.__traceback__ = _linked([step for step in own[:-1] if _is_users(step)][-most:] + own[-1:])


def _tidy(error: BaseException) -> None:
    """Free the texts of what an error of ours was raised from of control characters, which a file may have put there: Python prints them, too."""
    for above, one in itertools.pairwise(_behind(error)):
        text = said(one)
        if (kept := printable(text)) == text:
            continue
        with contextlib.suppress(Exception):
            one.args = (kept,)
        if printable(said(one)) != said(one):  # its class makes the text of something else
            instead = RuntimeError(f"{type(one).__name__}: {kept}").with_traceback(one.__traceback__)
            instead.__cause__, instead.__context__ = one.__cause__, one.__context__
            instead.__suppress_context__ = one.__suppress_context__
            if above.__cause__ is one:
                above.__cause__ = instead
            else:
                above.__context__ = instead
            return _tidy(instead)


def _linked(steps: list[TracebackType]) -> TracebackType | None:
    tb = None
    for step in reversed(steps):
        tb = TracebackType(tb, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return tb


def _is_users(step: TracebackType) -> bool:
    return step.tb_frame.f_globals.get("__name__") == "__main__" or is_users(step.tb_frame.f_code.co_filename)


def _is_ours(step: TracebackType) -> bool:
    return str(step.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in ("exporter", "symbolics", "contextlib")


def short(function: Callable[P, R]) -> Callable[P, R]:
    """A public function whose errors are short: shortened where the outermost of them is left."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        _thread.depth += 1
        try:
            try:
                return function(*args, **kwargs)
            finally:
                _thread.depth -= 1
        except Exception as error:
            shorten(error)
            raise  # adds no step of its own

    return called


class _Block(contextlib.ContextDecorator):
    """A context manager whose own errors are short, and stay so where they came through torch."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._make = make

    def _recreate_cm(self) -> _Block:  # what ContextDecorator asks for, for each call
        return _Block(self._make)

    def __enter__(self) -> Any:
        self._open = self._make()
        return _shortly(self._open.__enter__)

    def __exit__(self, kind: Any, error: Any, tb: Any) -> bool | None:
        ended = _shortly(lambda: self._open.__exit__(kind, error, tb))
        if hasattr(error, "whole"):
            shorten(error)
        return ended


def _shortly(call: Callable[[], Any]) -> Any:
    return short(call)()


def short_block(function: Callable[P, contextlib.AbstractContextManager[R]]) -> Callable[P, contextlib.AbstractContextManager[R]]:
    """`short` for a function that gives a context manager."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> contextlib.AbstractContextManager[R]:
        return _Block(lambda: function(*args, **kwargs))

    return called
