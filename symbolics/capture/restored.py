"""What Functions keep between calls, as it was before an export: a capture runs them on tensors that have no numbers, and some would stay there."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch

from symbolics import torch_private as private
from symbolics.capture.kept_state import Change, changes_of, names_of, said_of
from symbolics.capture.outputs import Outputs
from symbolics.node.classes import is_class, names_in
from symbolics.node.outside_values import other_values, values_read

__all__ = ["KeptState"]

_MISSING: Any = object()
_OTHER = (
    "it reads {}, which is {!r} in this call and was {!r} in an earlier one; a file has no such value of its own, and all its calls compute with the one that "
    "is there when it runs: pass it as an argument"
)
#: How far containers in containers are looked into.
_DEEP = 3
#: How many items of an array are compared.
_SOME = 4096


class KeptState:
    """The state of the Functions that one export meets.

    Attributes:
        values: What each read of its class and module at its first call, as `values_read` has it; others may stand there by the end of the export.
    """

    def __init__(self) -> None:
        self._changes: dict[Any, list[Change]] = {}
        self._attributes: list[tuple[Any, str, Any]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._said: set[tuple[Any, str]] = set()
        self.values: dict[Any, dict[str, Any]] = {}
        self._texts: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def meet(self, function: Any) -> list[Change]:
        """Take down what a Function keeps, before it runs for the first time; what it changes, as `changes_of` has it."""
        if function in self._changes:
            return self._changes[function]
        self._changes[function] = changes = changes_of(function)
        for cls in function.__mro__ if is_class(function) else ():
            if cls is torch.autograd.Function:
                break
            for name, value in names_in(cls).items():
                if not name.startswith("__"):
                    self._keep(cls, name, value)
        for change in changes:
            if change.key is None:
                self._keep_container(change.owner)
            else:
                names = names_in(change.owner) if is_class(change.owner) else change.owner
                self._keep(change.owner, change.key, names.get(change.key, _MISSING))
        return changes

    @contextlib.contextmanager
    def watching(self, function: Any) -> Iterator[list[str]]:
        """The names of what a forward changes while it runs, and of what it has set once, in an earlier run; it is filled in the end."""
        changes = [change for change in self.meet(function) if change.half == "forward" and change.kind != "memo"]
        before, found = [_picture(change) for change in changes], list[str]()
        yield found
        for change, was in zip(changes, before, strict=True):
            # A run on tensors without numbers leaves no trace in one that has some.
            is_there = change.kind == "once" and len(was) > 0 and was[-1] is not None and was[-1] is not _MISSING
            if is_there or isinstance(change.owner, torch.Tensor) or not _same(was, _picture(change)):
                found.append(change.name)

    def said_of_call(self, outputs: Outputs, function: Any, seen: Collection[str]) -> Outputs:
        """The outputs of a call, with what a file does not do that the call in eager does, as text: the state that it changes.

        Args:
            outputs: The outputs.
            function: The Function.
            seen: What its forward changed in this call.
        """
        backward = [change.name for change in self.meet(function) if change.half == "backward" and change.kind != "memo"]
        of_module = not is_class(function) and not hasattr(function, "python_functions")  # its call has the values of its class
        read = {} if of_module else values_read(function)
        others = other_values(self.values.setdefault(function, read), read)
        effects = said_of("forward", [*outputs.state, *seen]) + said_of("backward", backward) + [_OTHER.format(*each) for each in others]
        return replace(outputs, side_effects=[*outputs.side_effects, *self._noted(effects)], read=read)

    def effects_inlined(self, function: Any) -> list[str]:
        """The same, of a Function that is inlined: its backward does not run."""
        changes = [change for change in self.meet(function) if change.half == "forward" and change.kind != "memo"]
        return self._noted(said_of("inlined", [change.name for change in changes]))

    def _noted(self, texts: list[str]) -> list[str]:
        self._texts.update(texts)
        return texts

    def is_new(self, function: Any, text: str) -> bool:
        """Whether something of a Function has not been said yet; what is no state may be said of each call."""
        is_new = (function, text) not in self._said
        if text in self._texts:
            self._said.add((function, text))
        return is_new

    def restore(self) -> None:
        """Put back what was there in the places that now have tensors without numbers."""
        for owner, name, value in self._attributes:
            now = (names_in(owner) if is_class(owner) else owner).get(name)
            if not _is_traced(now):
                continue
            if value is _MISSING:
                delattr(owner, name) if is_class(owner) else owner.pop(name)
            elif is_class(owner):
                setattr(owner, name, value)
            else:
                owner[name] = value
        for container, before in self._containers.values():
            if any(map(_is_traced, container.values() if isinstance(container, dict) else container)):
                container.clear()
                container.extend(before) if isinstance(container, list) else container.update(before)

    def _keep(self, owner: Any, name: str, value: Any) -> None:
        self._attributes.append((owner, name, value))
        self._keep_container(value)

    def _keep_container(self, value: Any, deep: int = 0) -> None:
        """Take down what is in a container, and in the containers in it."""
        if deep > _DEEP or id(value) in self._containers:
            return
        if not isinstance(value, (dict, list, set)):
            value = names_of(value) if deep == 0 else None
            if type(value) is not dict:
                return
        self._containers[id(value)] = value, value.copy()
        for each in list(value.values() if isinstance(value, dict) else value):
            if isinstance(each, (dict, list, set)):
                self._keep_container(each, deep + 1)


def _picture(change: Change) -> tuple[Any, ...]:
    """What is in a place now, as far as it later shows whether that was changed."""
    owner = change.owner
    if change.key is None:
        if isinstance(owner, (bytearray, np.ndarray)):
            return ("bytes", bytes(owner[:_SOME]) if isinstance(owner, bytearray) else owner.reshape(-1)[:_SOME].tobytes())
        return tuple(each for pair in owner.items() for each in pair) if isinstance(owner, dict) else tuple(owner)
    return "value", (names_in(owner) if is_class(owner) else owner).get(change.key, _MISSING)


def _same(one: tuple[Any, ...], two: tuple[Any, ...]) -> bool:
    return len(one) == len(two) and all(a is b or (type(a) in (str, bytes) and a == b) for a, b in zip(one, two, strict=True))


def _is_traced(value: Any) -> bool:
    """Whether a value is a tensor of a capture, or a tuple with one."""
    if isinstance(value, tuple):
        return any(map(_is_traced, value))
    return isinstance(value, torch.Tensor) and private.is_of_a_capture(value)
