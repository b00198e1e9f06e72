"""The door to the ways out of an export that failed: they export and compare, so they stand above this room, which knows them by name alone."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from exporter.forward.failures import TorchExporterError
from exporter.forward.session import Hook, check_place, write
from symbolics.capture.checks import is_a_check
from symbolics.errors import ArgumentError
from symbolics.text import clean
from symbolics.users import TOOK

__all__ = ["Failed", "or_a_way_out", "said_once", "taken_for_constants"]

#: It has `way_out`, which gives what the export is to return; `tried`, the error with the ways that were tried; `differs`, how a file differs from eager.
_WAYS = "exporter.fallback.search"

#: Above so many bytes of parameters and buffers nobody tries what was not asked for: a try takes copies of them.
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Failed:
    """An export that failed.

    Attributes:
        hook: What it was told.
        dynamo: Which of torch's exporters it was.
        model, args, kwargs: The model and its example arguments.
        options: What else torch.onnx.export was given.
        error: What it raised, with its traceback.
        seconds: How long it took.
    """

    hook: Hook
    dynamo: bool
    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any]
    error: Exception
    seconds: float


def or_a_way_out(current: Hook, dynamo: bool, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An export; where it fails and ``fallback=True`` says so, the first way out that works.

    Args:
        current: The hook.
        dynamo: Which of torch's exporters it is.
        call: Exports.
        args, kwargs: With these arguments.

    Raises:
        TorchExporterError: torch's exporter cannot take the model; the text lists the ways out that were tried.
    """
    if current.trying:
        return call(*args, **kwargs)
    begin = time.perf_counter()
    if not current.fallback:
        try:
            return call(*args, **kwargs)
        except TorchExporterError as error:
            failed = _failed(current, dynamo, args, kwargs, error, begin)
            if failed is None or not _is_cheap(failed):
                raise
            told = importlib.import_module(_WAYS).tried(failed)
            if told is error:
                raise
            raise told from error
    given = {"f": None, **dict(zip(_NAMES, args, strict=False)), **kwargs}
    check_place(f := given["f"])
    with said_once() as said:
        try:
            result = call(**{**given, "f": None})
        except Exception as error:
            failed = _failed(current, dynamo, args, kwargs, error, begin)
            if failed is None:
                raise
        else:
            failed = None if dynamo else _right_at_the_example_alone(current, args, kwargs, said, begin)
        if failed is not None:
            kept, current.program = current.program, None
            result = importlib.import_module(_WAYS).way_out(failed, said, kept)
    if f is not None:
        assert current.program is not None
        write(current.program, f, given.get("external_data") if dynamo else None)
    return result


_NAMES = ("model", "args", "f")


def _right_at_the_example_alone(
    current: Hook, args: Sequence[Any], kwargs: Mapping[str, Any], said: Sequence[warnings.WarningMessage], begin: float
) -> Failed | None:
    """The export of TorchScript, whose file exists, as one that failed: it holds for constants what the inputs decide. None where it does not."""
    frozen, which = taken_for_constants(said), "torch.onnx.export(dynamo=False)"
    if frozen is not None:
        error = TorchExporterError(f"{which} takes for a constant what the inputs decide: {frozen[0]}, in module {frozen[1] or '<root>'}")
        error.module = frozen[1]
        return _failed(current, False, args, kwargs, error, begin)
    failed = _failed(current, False, args, kwargs, TorchExporterError(), begin)
    if failed is None or not (wrong := importlib.import_module(_WAYS).differs(failed, current.program)):
        return None
    error = TorchExporterError(f"{which} gives a file that differs from eager: {wrong}")
    error.module = ""
    return replace(failed, error=error)


def taken_for_constants(said: Sequence[warnings.WarningMessage]) -> tuple[str, str] | None:
    """What a trace took for a constant, though values of its inputs decide it: how and where, and the path of the module; None: nothing.

    Args:
        said: The warnings of the trace.
    """
    for each in said:
        if TOOK in str(each.message) and not is_a_check(each.filename, each.lineno):
            what = str(each.message).partition(TOOK)[0].strip().rstrip(",")
            return f"{what} at {clean(os.path.basename(each.filename))}:{each.lineno}", getattr(each.message, "module", "")
    return None


def _failed(current: Hook, dynamo: bool, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception, begin: float) -> Failed | None:
    """What failed; None where there is no way out: what was captured or compiled before, and calls that are wrong themselves."""
    given = dict(zip(_NAMES, args, strict=False)) | dict(kwargs)
    model, arguments = given.pop("model"), given.pop("args", None)
    asked = isinstance(model, torch.nn.Module) and not isinstance(model, torch.jit.ScriptModule)
    if not asked or isinstance(error, ArgumentError):
        return None
    arguments = () if arguments is None else (arguments,) if isinstance(arguments, torch.Tensor) else tuple(arguments)
    given.pop("f", None)
    return Failed(current, dynamo, model, arguments, given.pop("kwargs", None) or {}, given, error, time.perf_counter() - begin)


def _is_cheap(failed: Failed) -> bool:
    """Whether ways out are tried that nobody asked for."""
    held = (tensor for tensor in (*failed.model.parameters(), *failed.model.buffers()) if not torch.nn.parameter.is_lazy(tensor))
    return sum(tensor.nbytes for tensor in held) <= _MOST_BYTES


@contextlib.contextmanager
def said_once() -> Iterator[list[warnings.WarningMessage]]:
    """Warnings of the block are held back, and said when it ends, each text once; what is taken out of the list is not said."""
    said: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield said
    finally:
        for each in {(str(each.message), each.filename, each.lineno): each for each in said}.values():
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
