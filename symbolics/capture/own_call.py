"""A model whose class has a ``__call__`` of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["called_as_a_whole", "plainly_called"]

#: What the class of a graph has for itself: its call asks for that very class.
_OF_THE_GRAPH = ("__call__", "__dict__", "__weakref__", "_wrapped_call")


@contextlib.contextmanager
def plainly_called(module: torch.nn.Module, only: bool) -> Iterator[Callable[..., Any]]:
    """While the block runs, a call of the module is nn.Module's, also where its class has another: a trace gets what forward returns as it is.

    Args:
        module: The module.
        only: Whether to do anything.

    Yields:
        Takes the module's forward and the arguments of a call, and makes the call as the class makes it.
    """
    cls = type(module)
    if not only or cls.__call__ is torch.nn.Module.__call__:
        yield lambda forward, *args, **kwargs: forward(*args, **kwargs)
        return
    plain = type(
        cls.__name__, (cls,), {"__call__": torch.nn.Module.__call__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )

    def called(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = module.__dict__.get("forward")
        module.__dict__["forward"], module.__class__ = forward, cls
        try:
            return module(*args, **kwargs)
        finally:
            del module.__dict__["forward"]
            if before is not None:
                module.__dict__["forward"] = before
            module.__class__ = plain

    module.__class__ = plain
    try:
        yield called
    finally:
        module.__class__ = cls


@contextlib.contextmanager
def called_as_a_whole(module: torch.nn.Module) -> Iterator[None]:
    """While the block runs, a torch.fx.GraphModule is a plain module: torch.export runs a graph node by node, and never calls its forward."""
    if not isinstance(module, torch.fx.GraphModule):
        yield
        return
    this: Any = module
    cls = this.__class__
    own = cls.__mro__[: cls.__mro__.index(torch.fx.GraphModule)]  # torch makes a class for each graph, below that of the user
    members = {key: value for each in reversed(own) for key, value in vars(each).items() if key not in _OF_THE_GRAPH}
    this.__class__ = type(cls.__name__, (torch.nn.Module,), members)
    try:
        yield
    finally:
        this.__class__ = cls
