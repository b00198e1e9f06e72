"""What a PythonOp calls: a Function class, an operator or a module; found once the caller allows it, seen to take the arguments of the file, and called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch

from exporter.files.trust import Gate
from exporter.runtime.modules import CalledModule, check_module, find_module
from exporter.runtime.operators import check_operator, find_operator
from symbolics.errors import FormatError
from symbolics.node.call import AutogradCall
from symbolics.node.names import is_operator
from symbolics.node.operators import Operator

__all__ = ["apply_of", "called", "check_arguments"]


def called(call: AutogradCall, gate: Gate) -> Any:
    """What a node calls: a Function class, an operator or a module.

    Args:
        call: The call, its names as text.
        gate: What the file may name.

    Raises:
        FormatError, TrustError: The file names what is not allowed or not there.
    """
    if is_operator(call.name):
        return find_operator(call, gate)
    return gate("function", call.name) if call.module is None else find_module(call, call.module, gate)


def check_arguments(title: str, function: Any, call: AutogradCall, args: tuple[Any, ...]) -> None:
    """See that forward can be called with as many arguments, and of those names, as the node has.

    Args:
        title: How messages name the node.
        function: What `called` found.
        call: The call of the file.
        args: Its positional arguments.

    Raises:
        FormatError: It cannot.
    """
    if isinstance(function, Operator):
        check_operator(title, function, call, args)
        return
    if isinstance(function, CalledModule):
        check_module(title, function, call, args)
        return
    try:
        # The wrapper is what is called: it may take more than the function that it names in __wrapped__.
        signature = inspect.signature(function.forward, follow_wrapped=False)
    except (TypeError, ValueError):
        return  # a function of C says nothing of its arguments
    try:
        signature.bind(*([None] * _takes_context(function)), *args, **call.kwargs)
    except TypeError as error:
        raise FormatError(
            f"{title}: forward{signature} cannot be called as the file calls it: {error}.\n"
            "The Function has changed since the export, or the file is damaged: export the model again"
        ) from error


def apply_of(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``Function.apply`` of a class, never an override of it: that prepares arguments, and those of a file are prepared.

    Where forward's defaults need no filling in, it is what ``Function.apply`` ends in, 6 us against 8: a runtime's tensors
    are no functorch wrappers, which the rest looks for. Of an operator or a module, what calls it.
    """
    if function is None or isinstance(function, (Operator, CalledModule)):
        return None if function is None else function.apply
    if not kwargs and (_takes_context(function) or _binds_all(function.forward, args)):
        return super(torch.autograd.Function, function).apply
    # Where apply is a method of C, that binds the defaults itself.
    apply = getattr(torch.autograd.Function.apply, "__func__", None)
    return super(torch.autograd.Function, function).apply if apply is None else MethodType(apply, function)


def _binds_all(forward: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    try:
        bound = inspect.signature(forward).bind(*args)
    except (TypeError, ValueError):
        return False  # Function.apply has the words for it
    bound.apply_defaults()
    return len(bound.args) == len(args) and not bound.kwargs


def _takes_context(function: type) -> bool:
    """Whether forward's first argument is ctx: it is not where the class has a setup_context."""
    return function.setup_context is torch.autograd.Function.setup_context  # type: ignore[attr-defined]
