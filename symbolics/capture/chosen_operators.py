"""Operators of torch itself that ``opaque=`` makes nodes of: which of them a call of torch ends in, and what stands in for that call.

A model calls functions of C (torch.linalg.solve, x.isclose), which name no operator. What a call ends in is seen where autograd is switched
off: there the first operator comes whole, with its arguments by its schema, also one that torch is about to take apart (linalg_solve).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from symbolics import torch_private as private
from symbolics.capture.composites import inner_body_of
from symbolics.capture.listener import Listener

__all__ = ["Called", "OperatorsSeen", "called_operator", "stand_in"]


class Called(NamedTuple):
    """What a call of torch ends in.

    Attributes:
        overload: The operator; of one that changes its first argument (``erfinv_``), the one that does not.
        args, kwargs: Its arguments.
        changes: Whether the result is to be written into the first argument.
        returns: What makes a tuple of results a named one (``torch.return_types.linalg_eigh``), as the function has it and the operator does not.
    """

    overload: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    changes: bool
    returns: Callable[[Any], Any] | None


def called_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called | None:
    """The operator that a call ends in; None where it ends in none, in several, or gives its result through ``out=``. It is not called."""
    if kwargs.get("out") is not None or not _may_be_an_operator(func):
        return None
    found = private.first_operator(func, args, kwargs)
    if found is None:
        return None
    overload, args, kwargs = found
    schema = private.schema_of(overload)
    returns = None if isinstance(func, private.operator_classes()) else getattr(torch.return_types, func.__name__, None)
    if not schema.is_mutable:
        return Called(overload, args, kwargs, False, returns)
    name = schema.name
    pure = private.find_overload(name[:-1], schema.overload_name or "default") if name.endswith("_") else None
    return None if pure is None else Called(pure, args, kwargs, True, returns)


@functools.lru_cache(maxsize=4096)
def _may_be_an_operator(func: Any) -> bool:
    """Whether a function is one of torch's operators by its name: others (size, __get__, register_hook) must not be called a second time.

    `stand_in` itself writes by copy_.
    """
    if isinstance(func, private.operator_classes()):
        return not private.operator_name(func)
    name = "" if isinstance(func, types.FunctionType) else getattr(func, "__name__", "")
    return bool(name) and name not in ("__get__", "__set__", "copy_") and bool(private.signatures_of(name))


def stand_in(listener: Listener, called: Called, write: Callable[[torch.Tensor, Any], Any]) -> Any:
    """What a call of a chosen operator gives, made by who listens.

    Args:
        listener: It stands in for the operator.
        called: The call.
        write: Writes the second tensor into the first, and returns it.
    """
    result = listener.operator(called.overload, called.args, called.kwargs, lambda: called.overload(*called.args, **called.kwargs))
    if called.returns is not None and isinstance(result, tuple):
        return called.returns(result)
    return write(called.args[0], result) if called.changes else result


class OperatorsSeen(TorchFunctionMode):
    """While it is open, calls of chosen operators go to a listener, also those inside torch's own functions of Python.

    Args:
        listener: It stands in for them.
        chosen: Which operators they are.
    """

    def __init__(self, listener: Listener, chosen: Callable[[Any], object]) -> None:
        super().__init__()
        self._listener = listener
        self._chosen = chosen

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not self._listener.listening() or torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        body = inner_body_of(func)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        called = called_operator(func, args, kwargs)
        if called is None or not self._chosen(called.overload):
            return func(*args, **kwargs)
        return stand_in(self._listener, called, lambda target, result: target.copy_(result))
