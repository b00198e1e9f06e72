"""unchanged(): whatever code inside the block does to a model and its arguments is undone.

A model's forward may write into parameters and buffers, append to lists, count in objects of its own, draw from its own
generators. The walk below finds all of that from the model on and keeps what it holds; afterwards what differs is put back,
in place: every object stays the one that it was.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from symbolics import torch_private as private
from symbolics.capture.side_effects import same_values

__all__ = ["unchanged"]

Undo = Callable[[], None]

#: Objects of these belong to the process, not to a model: loggers, locks, threads, files.
_STANDARD = sys.stdlib_module_names
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device)


@contextlib.contextmanager
def unchanged(*roots: Any) -> Iterator[None]:
    """Undo all changes of what can be reached from the roots, and of the random states of torch, numpy and Python.

    Not undone: changes of global variables and classes, and of objects of the standard library other than containers.
    """
    kept = _Kept()
    kept.walk([private.parametrization_cache(), *roots])
    undo = [_generators(), *kept.undo]
    try:
        yield
    finally:
        for back in undo:
            back()
        for container, before in kept.containers:
            if len(container) != len(before) or not _holds_the_same(container, before):
                _refill(container, before)


def _generators() -> Undo:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return back


class _Kept:
    """What a walk found.

    Attributes:
        undo: What puts back each tensor, generator and object.
        containers: Each dict, list, deque and set, and what is in it. Modules are made of empty ones: a pair is all they cost.
    """

    def __init__(self) -> None:
        self.undo: list[Undo] = []
        self.containers: list[tuple[Any, Any]] = []

    def walk(self, todo: list[Any]) -> None:
        """Remember each object that can be reached."""
        seen: dict[int, Any] = {}  # the objects too: an id is one object's only while it lives
        while todo:
            value = todo.pop()
            if isinstance(value, _PLAIN) or id(value) in seen:
                continue
            seen[id(value)] = value
            if type(value) is dict or type(value) is OrderedDict:
                self.containers.append((value, dict(value)))
                todo += value.values()
            else:
                todo += self._keep(value)

    def _keep(self, value: Any) -> Iterable[Any]:
        """Remember one object; what it refers to."""
        undo = self.undo
        if isinstance(value, torch.Tensor):
            undo.append(_tensor(value))
            return ()
        inside: list[Any] = []
        if isinstance(value, (dict, list, deque, set)):
            before = dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)
            self.containers.append((value, before))
            inside = list(before.values()) if isinstance(before, dict) else [] if isinstance(before, set) else before
        elif isinstance(value, (tuple, frozenset)):
            inside = list(value)
        elif isinstance(value, np.ndarray):
            undo.append(functools.partial(_restore_array, value, value.copy()))
        elif isinstance(value, random.Random):
            undo.append(functools.partial(value.setstate, value.getstate()))
        elif isinstance(value, torch.Generator):
            undo.append(functools.partial(_restore_generator, value, value.get_state()))
        elif isinstance(value, np.random.Generator):
            undo.append(functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, functools.partial):
            inside = [value.func, value.args, value.keywords]
        elif isinstance(value, types.MethodType):
            inside = [value.__self__]
        elif isinstance(value, types.FunctionType):
            cells = [cell for cell in value.__closure__ or () if not _is_empty(cell)]
            undo += [functools.partial(setattr, cell, "cell_contents", cell.cell_contents) for cell in cells]
            inside = [cell.cell_contents for cell in cells] + list(value.__defaults__ or ())
        return (*inside, *_attributes(value, undo))


def _attributes(value: Any, undo: list[Undo]) -> list[Any]:
    """Remember the attributes of an object; their values."""
    kind = type(value)
    if kind.__module__.split(".")[0] in _STANDARD and kind is not types.SimpleNamespace:
        return []
    inside = []
    names = [name for owner in kind.__mro__ for name in _slots(owner) if hasattr(value, name)]
    for name in names:
        inside.append(getattr(value, name))
        undo.append(functools.partial(_restore_slot, value, name, inside[-1]))
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        # The class as well: lazy modules become another one.
        undo.append(functools.partial(_restore_attributes, value, kind, own, dict(own)))
        inside += own.values()
    return inside


def _slots(owner: type) -> tuple[str, ...]:
    names = owner.__dict__.get("__slots__", ())
    return tuple(name for name in ((names,) if isinstance(names, str) else names) if not name.startswith("__"))


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def _tensor(tensor: torch.Tensor) -> Undo:
    if private.is_fake(tensor) or tensor.is_meta or tensor.layout != torch.strided or torch.nn.parameter.is_lazy(tensor):
        return lambda: None
    memory, gradient = tensor.data, tensor.grad if tensor.is_leaf else None  # .data: what is put back counts as no change to autograd
    values, flag = memory.clone(), tensor.requires_grad

    def back() -> None:
        with torch.no_grad():
            if tensor.data_ptr() != memory.data_ptr() or tensor.shape != memory.shape or tensor.dtype != memory.dtype:
                tensor.data = memory
            if not same_values(memory, values):
                memory.copy_(values)
            if tensor.is_leaf and tensor.grad is not gradient:
                tensor.grad = gradient
            if tensor.is_leaf and tensor.requires_grad != flag:
                tensor.requires_grad_(flag)

    return back


def _refill(container: Any, before: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(before)


def _holds_the_same(value: Any, before: Any) -> bool:
    if isinstance(value, dict):
        return all(key in value and value[key] is item for key, item in before.items())
    if isinstance(value, set):
        return bool(value == before)
    return all(one is two for one, two in zip(value, before, strict=True))


def _restore_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _restore_array(array: np.ndarray[Any, Any], before: np.ndarray[Any, Any]) -> None:
    if array.flags.writeable and array.shape == before.shape:
        array[...] = before


def _restore_slot(value: Any, name: str, before: Any) -> None:
    if getattr(value, name, None) is not before:
        object.__setattr__(value, name, before)


def _restore_attributes(value: Any, kind: type, own: dict[str, Any], before: dict[str, Any]) -> None:
    if type(value) is not kind:
        value.__class__ = kind
    if len(own) != len(before) or not _holds_the_same(own, before):
        own.update(before)
        for name in set(own) - set(before):
            del own[name]
