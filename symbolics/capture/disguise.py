"""What a model is told when it asks whether it is being traced, compiled or exported.

Libraries ask, and take another way: brevitas rounds without its straight-through Function while torch.jit traces. Mostly
the other way is the better one for an export, so the truth is told. `as_in_eager` is for a model whose Functions got
lost so: the functions that lead to them, or all code outside of torch, asking in this thread, are told that nothing special goes on.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from symbolics import torch_private as private

__all__ = ["answer", "as_exported", "as_in_eager"]

_OURS = {"torch", "onnxscript", "symbolics", "exporter"}

#: The questions that each of torch's exporters answers by yes, by whether it is the one with dynamo=True.
_EXPORTING = {
    True: frozenset({"is_exporting", "is_compiling", "is_in_onnx_export"}),
    False: frozenset({"is_tracing", "is_in_onnx_export"}),
}

_thread = threading.local()
_lock = threading.Lock()
_open = 0
_originals: dict[types.CodeType, Any] = {}


@contextlib.contextmanager
def as_in_eager(wanted: Callable[[types.FrameType], bool] = lambda _: True) -> Iterator[None]:
    """While the block runs, this thread's code outside of torch is answered as in eager mode.

    Args:
        wanted: Whether the code that asks, by its frame, is.
    """
    with _answering(wanted, frozenset()):
        yield


@contextlib.contextmanager
def as_exported(dynamo: bool) -> Iterator[None]:
    """While the block runs, this thread's code outside of torch is answered as under one of torch's exporters."""
    with _answering(lambda _: True, _EXPORTING[dynamo]):
        yield


@contextlib.contextmanager
def _answering(wanted: Callable[[types.FrameType], bool], yes: frozenset[str]) -> Iterator[None]:
    global _open
    with _lock:
        _open += 1
        if _open == 1:
            _put_on()
    before = getattr(_thread, "wanted", None), getattr(_thread, "yes", yes)
    _thread.wanted, _thread.yes = wanted, yes
    try:
        yield
    finally:
        _thread.wanted, _thread.yes = before
        with _lock:
            _open -= 1
            if _open == 0:
                _take_off()


def answer(asked: types.CodeType, caller: types.FrameType) -> Any:
    """The answer to one question, the truth but for a disguised model."""
    return asked.co_name in _thread.yes if _is_disguised_from(caller) else _originals[asked]()


def _is_disguised_from(caller: types.FrameType) -> bool:
    wanted = getattr(_thread, "wanted", None)
    return wanted is not None and caller.f_globals.get("__name__", "").split(".")[0] not in _OURS and wanted(caller)


def _put_on() -> None:
    # People import these functions by name: what is changed is the code behind them, so that any reference is answered.
    for function in private.tracing_questions():
        code = _question.__code__.replace(co_name=function.__name__, co_filename=function.__code__.co_filename)
        _originals[code] = types.FunctionType(function.__code__, function.__globals__, function.__name__)
        function.__code__ = code
    holder, names = private.tracing_questions_of_c()
    for name, otherwise in names.items():
        original = getattr(holder, name)

        def question(original: Any = original, otherwise: Any = otherwise) -> Any:
            return otherwise if _is_disguised_from(sys._getframe(1)) else original()

        question.original = original  # type: ignore[attr-defined]
        setattr(holder, name, question)


def _take_off() -> None:
    for function in private.tracing_questions():
        function.__code__ = _originals.pop(function.__code__).__code__
    holder, names = private.tracing_questions_of_c()
    for name in names:
        setattr(holder, name, getattr(holder, name).original)


def _question() -> Any:
    # Runs among the globals of the function whose code it is.
    import sys

    from symbolics.capture.disguise import answer

    return answer(sys._getframe(0).f_code, sys._getframe(1))
