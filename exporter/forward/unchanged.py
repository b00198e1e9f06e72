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
from typing import Any, Self

import numpy as np
import torch

from exporter.train_mode.reads import OWN
from symbolics import torch_private as private
from symbolics.capture.side_effects import same_values

__all__ = ["Kept", "attributes_unchanged", "unchanged"]

Undo = Callable[[], None]

#: Objects of these belong to the process, not to a model: loggers, locks, threads, files.
_STANDARD = sys.stdlib_module_names
_CONTAINERS = (OrderedDict, dict, list, deque, set, tuple, frozenset)
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device)


@contextlib.contextmanager
def unchanged(*roots: Any) -> Iterator[Kept]:
    """Undo all changes of what can be reached from the roots, and of the random states of torch, numpy and Python.

    Not undone: changes of global variables and classes, and of objects of the standard library other than containers.

    Yields:
        What is kept.
    """
    kept, back = Kept(private.parametrization_cache(), *roots), _generators()
    try:
        with kept:
            yield kept
    finally:
        back()


@contextlib.contextmanager
def attributes_unchanged(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Put back the attributes of some modules, and what is in them; not their parameters, buffers, modules and hooks."""
    before = [(module, {name: value for name, value in module.__dict__.items() if name not in OWN}) for module in modules]
    with Kept(*(value for _, own in before for value in own.values())):
        try:
            yield
        finally:
            for module, own in before:
                for name in [name for name in module.__dict__ if name not in OWN and name not in own]:
                    del module.__dict__[name]
                module.__dict__.update(own)


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


class Kept:
    """Objects as they are now; they are put back as such when the block ends.

    Args:
        *roots: What to keep, with all that can be reached from it.

    Attributes:
        undo: What puts back each generator and object.
        containers: Each dict, list, deque and set, and what is in it. Modules are made of empty ones: a pair is all they cost.
    """

    def __init__(self, *roots: Any) -> None:
        self.undo: list[Undo] = []
        self.containers: list[tuple[Any, Any]] = []
        self._tensors: dict[int, _Tensor] = {}
        self.walk([*roots])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for tensor in self._tensors.values():
            tensor.put_back()
        for back in self.undo:
            back()
        for container, before in self.containers:
            if not _holds_the_same(container if type(container) in _CONTAINERS else _content(container), before):
                _refill(container, before)

    def values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a tensor held; None where it is not kept."""
        found = self._tensors.get(id(tensor))
        return None if found is None else found.values

    def has_changed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that is kept holds other values now."""
        before = self.values(tensor)
        return before is not None and before.shape == tensor.shape and not same_values(before, tensor)

    def put_back(self, tensor: torch.Tensor) -> None:
        """Put one tensor back now."""
        if id(tensor) in self._tensors:
            self._tensors[id(tensor)].put_back()

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
            if not (private.is_fake(value) or value.is_meta or value.layout != torch.strided or torch.nn.parameter.is_lazy(value)):
                self._tensors[id(value)] = _Tensor(value)
            return ()
        inside: list[Any] = []
        if isinstance(value, (dict, list, deque, set)):
            before = _content(value)
            self.containers.append((value, before))
            inside = list(before.values()) if isinstance(before, dict) else [] if isinstance(before, set) else before
        elif isinstance(value, (tuple, frozenset)):
            inside = [*_standard(value).__iter__(value)]
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
    if kind is not types.SimpleNamespace and all(_is_standard(owner) for owner in kind.__mro__):
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


def _is_standard(owner: type) -> bool:
    # A class that abc makes says that it is abc's own: type(name, bases, ...) of an abstract class, a parametrized module's for one.
    return owner.__module__.split(".")[0] in _STANDARD


def _slots(owner: type) -> tuple[str, ...]:
    names = owner.__dict__.get("__slots__", ())
    return tuple(name for name in ((names,) if isinstance(names, str) else names) if not name.startswith("__"))


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


class _Tensor:
    """A tensor as it was."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._memory = tensor.data  # what is put back through it counts as no change to autograd
        self._gradient = tensor.grad if tensor.is_leaf else None
        self._flag = tensor.requires_grad
        self.values = self._memory.clone()

    def put_back(self) -> None:
        tensor, memory = self._tensor, self._memory
        with torch.no_grad():
            if tensor.data_ptr() != memory.data_ptr() or tensor.shape != memory.shape or tensor.dtype != memory.dtype:
                tensor.data = memory
            if not same_values(memory, self.values):
                memory.copy_(self.values)
            if tensor.is_leaf and tensor.grad is not self._gradient:
                tensor.grad = self._gradient
            if tensor.is_leaf and tensor.requires_grad != self._flag:
                tensor.requires_grad_(self._flag)


def _standard(value: Any) -> Any:
    """The class of Python's own that a container is: its methods. Those of a class derived from it may refuse, count or compute."""
    return next(owner for owner in type(value).__mro__ if owner in _CONTAINERS)


def _content(value: Any) -> Any:
    """What is in a dict, list, deque or set, in a dict, list or set of its own."""
    kind = _standard(value)
    if type(value) is dict or type(value) is OrderedDict:
        return dict(value)
    if isinstance(value, dict):
        return {key: kind.__getitem__(value, key) for key in kind.__iter__(value)}
    return set(kind.__iter__(value)) if isinstance(value, set) else [*kind.__iter__(value)]


def _refill(container: Any, before: Any) -> None:
    kind = _standard(container)
    kind.clear(container)
    if isinstance(before, dict):
        for key, item in before.items():
            kind.__setitem__(container, key, item)
    else:
        (kind.update if isinstance(before, set) else kind.extend)(container, before)


def _holds_the_same(value: Any, before: Any) -> bool:
    """Whether two dicts, lists or sets hold the same objects."""
    if len(value) != len(before):
        return False
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
    if not _holds_the_same(own, before):
        own.update(before)
        for name in set(own) - set(before):
            del own[name]
