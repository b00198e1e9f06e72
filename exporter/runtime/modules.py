"""The module that a node calls: its classes found once the caller allows them, itself made of what the file says."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial
from sys import getrefcount
from types import FunctionType
from typing import Any

import torch

from exporter.files.trust import Gate
from symbolics.errors import FormatError, RunError, TrustError
from symbolics.node.call import AutogradCall, ModuleOrigin
from symbolics.node.containers import ModulePlace, expand_leaves
from symbolics.node.held_modules import Held, with_modules
from symbolics.node.modules import read_module
from symbolics.node.names import is_of_torch, qualified_name
from symbolics.text import shown

__all__ = ["CalledModule", "check_module", "find_module"]


class CalledModule:
    """A module of a file, as what a PythonOp calls.

    A call has a module for itself while it runs, as it holds the call's tensors: where two run at a time, there are two. Where something keeps the
    module for the backward (a checkpoint, an adjoint method), it stays with that. Of an object that was registered there is one, and calls wait
    for each other.

    A function that is called is one, too: it holds the modules among its arguments.

    Attributes:
        forward: The forward of its class, or of the registered object; or the function.
        count: How many modules there are among the arguments of a function.
    """

    def __init__(self, origin: ModuleOrigin, made: Callable[[], Held], *, single: bool = False, function: Any = None) -> None:
        """Args: what the file says of it; makes one; whether all calls share one, with tensors of its own; the function that is called."""
        self._count, self._changes, self._made = len(origin.state), origin.changes, made
        first = made()
        if not set(origin.changes) <= {index for *_, index in first.places}:
            raise FormatError.damaged("the module of a call", "it changes a tensor that stands nowhere in it")
        self._free = [first]
        self._waiting = threading.RLock() if single else None
        self._own = [dict_[key] for dict_, key, _ in _firsts(first)] if single else None
        self.forward, self._function = function or first.module.forward, function
        self.count = len(first.module) if function is not None else 0  # type: ignore[arg-type]

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Call it: its parameters and buffers, then its own arguments."""
        if self._waiting is not None:
            with self._waiting:
                return self._run(self._free[0], args, kwargs)
        try:
            held = self._free.pop()
        except IndexError:
            held = self._made()
        return self._run(held, args, kwargs)

    def _run(self, held: Held, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count, before, kept = self._count, list(map(getrefcount, held.modules)), False
        try:
            result = held.run(
                held.module.forward if self._function is None else partial(self._call, held.module),
                args[:count],
                held.inside(args[:count]),
                self._changes,
                args[count:],
                kwargs,
            )
        finally:
            held.changed()
            kept = list(map(getrefcount, held.modules)) != before
            if self._own is not None or not kept:
                held.let_go(self._own)
                if self._own is None:
                    self._free.append(held)
        if kept and self._own is not None and torch.is_grad_enabled():
            raise RunError(
                f"the registered module of type {qualified_name(type(held.module))} is kept for its backward (by a checkpoint, an adjoint method), which would run "
                "it with other parameters: name its class in place of the object, or register none"
            )
        return result

    def _call(self, modules: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_modules(modules, args, kwargs)
        return self._function(*args, **kwargs)

    def python_functions(self) -> dict[str, dict[str, Any]]:
        """As `symbolics.node.fingerprints` takes them."""
        return {"forward": {"forward": self._function}}


def _firsts(held: Held) -> list[tuple[dict[str, Any], str, int]]:
    """The first place of each tensor."""
    found = {index: (place, key, index) for place, key, index in reversed(held.places)}
    return [found[index] for index in range(len(held.names))]


def find_module(call: AutogradCall, origin: ModuleOrigin, gate: Gate) -> CalledModule:
    """The module that a call names.

    Args:
        call: The call, its names as text.
        origin: What it says of the module.
        gate: What the file may name.

    Raises:
        FormatError, TrustError: The file says something else than a module, or names what is not allowed or not there.
    """
    title = shown(call.name)
    if set(origin.tree) == {"object"}:
        module = gate("object", origin.tree["object"])
        if not isinstance(module, torch.nn.Module):
            raise TrustError(
                f"the file names {shown(str(origin.tree['object']))} as a module, here it is of type {qualified_name(type(module))}"
            )
        if qualified_name(type(module)) != call.name:
            raise TrustError(
                f"the file names {shown(str(origin.tree['object']))} as a module of {title}, here it is of type {qualified_name(type(module))}"
            )
        held, _ = Held.of(module)
        if held.names != list(origin.state) or held.complex != origin.complex:
            raise FormatError(
                f"{title}: the registered module {shown(origin.tree['object'])} has other parameters and buffers than at the export: register what was exported"
            )
        gate.functions[call.name] = type(module)
        return CalledModule(origin, lambda: held, single=True)
    if origin.function:
        function = gate("callable", call.name)
        if not isinstance(function, FunctionType):  # an entry for a class of modules is none for its constructor
            raise TrustError(f"the file names {title} as a function, here it is of type {qualified_name(type(function))}")
        if origin.tree.get("name") != qualified_name(torch.nn.ModuleList):
            raise FormatError.damaged(title, "its call attribute says a module, and it is a function")
        called = CalledModule(origin, read_module(origin.tree, origin.state, gate, title, origin.complex), function=function)
        gate.functions[call.name] = called
        return called
    if origin.tree.get("name") != call.name:
        raise FormatError.damaged(title, "its call attribute says another class")
    if is_of_torch(call.name):
        gate("module", call.name)  # inside of what is allowed, layers need no entry
    return CalledModule(origin, read_module(origin.tree, origin.state, gate, title, origin.complex))


def check_module(title: str, module: CalledModule, call: AutogradCall, args: tuple[Any, ...]) -> None:
    """See that a module's forward takes the arguments of a call.

    Args:
        title: How messages name the node.
        module, call: The module, and the call of the file.
        args: Its positional arguments, the module's state first.

    Raises:
        FormatError: It does not.
    """
    count = len(call.module.state) if call.module is not None else 0
    for leaf in expand_leaves((*args, *call.kwargs.values())):
        if type(leaf) is ModulePlace and leaf.index >= module.count:
            raise FormatError.damaged(title, f"an argument is its module {leaf.index}, and it has {module.count}")
    try:
        inspect.signature(module.forward).bind(*args[count:], **call.kwargs)
    except TypeError as error:
        raise FormatError(
            f"{title}: forward{inspect.signature(module.forward)} cannot be called as the file calls it: {error}.\n"
            "The module has changed since the export, or the file is damaged: export the model again"
        ) from error
    except ValueError:
        return  # a function of C says nothing of its arguments
