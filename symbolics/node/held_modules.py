"""A module in the hand: where it keeps its parameters and buffers, and how a call of it runs with others in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import is_
from types import NoneType
from typing import Any

import numpy as np
import torch

from symbolics import torch_private as private
from symbolics.errors import RunError
from symbolics.node.arguments import has_codec
from symbolics.node.containers import ModulePlace, Slot, expand_leaves, fill, slots
from symbolics.node.dtypes import as_real
from symbolics.node.names import is_of_torch, qualified_name
from symbolics.node.plain_objects import carries_more, holders_in

__all__ = ["Held", "apart", "attributes_of", "is_said", "modules_taken", "with_modules", "with_slots"]


@dataclass
class Held:
    """A module, and where it and the modules inside it keep their state.

    Attributes:
        module: The module.
        names: The names of its parameters and buffers, each tensor once.
        places: Where they stand: a dict, a key, and the number of the tensor.
        lists: Attributes that hold some of them, as a recurrent layer's list of weights: a dict, a key, and the value with `Slot`s.
        modules: The module, and those inside it.
        own: The attributes of each module that a call may leave others in, and a copy of them; with its path, None for a layer of torch's own.
        contents: The lists, dicts, sets and arrays in these, and a copy of each; with the path of the attribute.
        complex: The numbers of those that are complex: outside of the module, each is its real and imaginary parts in a last dimension.
    """

    module: torch.nn.Module
    names: list[str] = field(default_factory=list)
    places: list[tuple[dict[str, Any], str, int]] = field(default_factory=list)
    lists: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    own: list[tuple[str | None, dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    contents: list[tuple[str, Any, Any]] = field(default_factory=list)
    complex: tuple[int, ...] = ()

    @classmethod
    def of(cls, module: torch.nn.Module) -> tuple[Held, list[torch.Tensor]]:
        """Look where a module keeps its state, and what that is now."""
        held, tensors, numbers = cls(module, modules=list(module.modules())), list[torch.Tensor](), dict[int, int]()
        for path, inner in module.named_modules():
            parameters, buffers, _ = private.parts_of(inner)
            for place in (parameters, buffers):
                for key, tensor in place.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in numbers:
                        numbers[id(tensor)] = len(tensors)
                        tensors.append(tensor)
                        held.names.append(f"{path}.{key}" if path else key)
                    held.places.append((place, key, numbers[id(tensor)]))
        held.complex = tuple(number for number, tensor in enumerate(tensors) if tensor.dtype.is_complex)
        for path, inner in module.named_modules():
            said = None if is_of_torch(qualified_name(type(inner))) else path
            held.own.append((said, vars(inner), dict(vars(inner))))
            for key, value in attributes_of(inner).items():
                template = with_slots(value, numbers)
                if slots(template):
                    held.lists.append((vars(inner), key, template))
                if said is not None:
                    held.watch(f"{path}.{key}".lstrip("."), value, anew=bool(slots(template)))
        return held, tensors

    def watch(self, path: str, value: Any, *, anew: bool) -> None:
        """Take down what is in an attribute; ``anew``: its lists and dicts are made for each call."""
        for one, of_object in holders_in(value, is_said):
            if of_object:
                self.own.append((path, one, dict(one)))
            elif not anew:
                self.contents.append((path, one, one.copy()))

    def changed(self) -> list[str]:
        """The attributes that a call has set or changed, put back to what they were; empty where it did neither."""
        found = []
        for path, now, before in self.own:
            # Each call comes here: compared without a line of Python per attribute. In another order they are put back, too.
            if now.keys() == before.keys() and all(map(is_, now.values(), before.values())):
                continue
            ours = [key for place, key, _ in self.lists if place is now]
            moved = [key for key in {**before, **now} if now.get(key, self) is not before.get(key, self) and key not in ours]
            found += [] if path is None else [f"{path}.{key}".lstrip(".") for key in moved]
            now.clear()
            now.update(before)
        for path, now, before in self.contents:
            if not _holds_the_same(now, before):
                _refill(now, before)
                found += [path] if path not in found else []
        return found

    def inside(self, given: Sequence[Any]) -> Sequence[Any]:
        """The tensors of a call as the module has them: views as complex numbers of the parts of complex ones."""
        if not self.complex:
            return given
        return [_as_complex(tensor) if number in self.complex else tensor for number, tensor in enumerate(given)]

    def outside(self, tensors: Sequence[Any]) -> list[Any]:
        """The inverse of `inside`."""
        return [as_real(tensor) for tensor in tensors]

    def run(
        self,
        forward: Callable[..., Any],
        given: Sequence[Any],
        state: Sequence[Any],
        changes: Sequence[int],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the module with tensors in the places of its own.

        Args:
            forward: Its forward.
            given: One per name.
            state: What `inside` made of them.
            changes: Which of them the call changes, by number.
            args, kwargs: Its arguments.

        Returns:
            What forward returned; where there are changes, a tuple of that and those that were given.
        """
        for place, key, index in self.places:
            place[key] = state[index]
        for place, key, template in self.lists:
            place[key] = fill(template, lambda slot: state[slot.index] if isinstance(slot, Slot) else slot)
        result = apart(forward(*args, **kwargs), (state, args, kwargs))
        return (result, *self.written(given, state, changes)) if changes else result

    def written(self, given: Sequence[Any], state: Sequence[Any], changes: Iterable[int]) -> list[Any]:
        """Those given that a call changed; one that it replaced takes over the values of what is in its place."""
        now = {index: place.get(key) for place, key, index in reversed(self.places)}
        for index in changes:
            if isinstance(now[index], torch.Tensor) and now[index] is not state[index]:
                with torch.no_grad():
                    state[index].copy_(now[index])
        return [given[index] for index in changes]

    def with_gradient(self, changes: Iterable[int]) -> list[str]:
        """The tensors, of those that a call changed, through which a gradient flows from this call to the next."""
        now = {index: place.get(key) for place, key, index in reversed(self.places)}
        return [self.names[index] for index in changes if isinstance(now[index], torch.Tensor) and now[index].grad_fn is not None]

    def replaced(self, state: Sequence[Any]) -> list[int]:
        """The tensors in whose places a call left others."""
        return sorted({index for place, key, index in self.places if place.get(key) is not state[index]})

    def statistics(self) -> set[int]:
        """The running statistics that torch's own layers change in training, by number."""
        found = set()
        for module in self.module.modules():
            if private.changes_its_statistics(module):
                _, buffers, _ = private.parts_of(module)
                found |= {index for place, _, index in self.places if place is buffers}
        return found

    def let_go(self, state: Sequence[Any] | None = None) -> None:
        """Put other tensors into the places, or None: nothing here keeps the tensors of a call."""
        for place, key, index in self.places:
            place[key] = None if state is None else state[index]
        for place, key, template in self.lists:
            place[key] = None if state is None else fill(template, lambda slot: state[slot.index] if isinstance(slot, Slot) else slot)


def _holds_the_same(now: Any, before: Any) -> bool:
    """Whether a list, dict, set or array has what its copy has."""
    if type(now) is np.ndarray:
        return bool(now.shape == before.shape and now.dtype == before.dtype and now.tobytes() == before.tobytes())
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(now[key] is value for key, value in before.items())
    return bool(now == before) if type(now) is set else all(map(is_, now, before))


def _refill(now: Any, before: Any) -> None:
    if type(now) is np.ndarray or type(now) is list:
        now[:] = before
    else:
        now.clear()
        now.update(before)


def _as_complex(parts: torch.Tensor) -> torch.Tensor:
    """Real and imaginary parts, in the last dimension, as complex numbers: a view.

    Raises:
        RunError: The last dimension has another size than 2.
    """
    if not parts.dim() or parts.shape[-1] != 2:
        raise RunError(
            f"a complex tensor of a module is given as one of shape {tuple(parts.shape)}: its last dimension holds real and imaginary parts, 2 numbers "
            "(torch.view_as_real)"
        )
    return torch.view_as_complex(parts)


#: What holds no tensors but itself; other arguments are looked into.
_LEAVES = frozenset((torch.Tensor, int, float, str, bool, NoneType))


def apart(result: Any, given: tuple[Sequence[Any], Sequence[Any], dict[str, Any]]) -> Any:
    """A result; where it is, or holds, a tensor that was given, a view of that: it is no change of what was given."""
    state, args, kwargs = given
    if type(result) is torch.Tensor and not kwargs:
        for one in args:  # each call comes here: loops are quicker than sets of what is so short
            if one is result or type(one) not in _LEAVES:
                break
        else:
            if not any(map(is_, state, repeat(result))):
                return result
    known = {id(leaf) for leaf in expand_leaves((*state, *args, *kwargs.values())) if isinstance(leaf, torch.Tensor)}
    return fill(result, lambda leaf: leaf.view_as(leaf) if id(leaf) in known and isinstance(leaf, torch.Tensor) else leaf)


#: What an export itself puts into a model.
_STAND_INS = ("forward", "state_dict")


def attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    """What a module holds beside what every module has."""
    return {key: value for key, value in private.own_attributes(module).items() if key not in _STAND_INS}


def with_slots(value: Any, numbers: dict[int, int]) -> Any:
    """A value with a `Slot` in the place of each tensor that is known by its identity."""
    if not any(isinstance(leaf, torch.Tensor) for leaf in expand_leaves(value)):
        return value
    return fill(value, lambda leaf: Slot(numbers[id(leaf)]) if isinstance(leaf, torch.Tensor) and id(leaf) in numbers else leaf)


def modules_taken(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.nn.ModuleList, tuple[Any, ...], dict[str, Any]]:
    """The modules among arguments, and the arguments with a `ModulePlace` for each."""
    found: dict[int, tuple[int, torch.nn.Module]] = {}

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.nn.Module):
            return value
        return ModulePlace(found.setdefault(id(value), (len(found), value))[0])

    taken, named = fill(tuple(args), leaf), {key: fill(value, leaf) for key, value in kwargs.items()}
    return torch.nn.ModuleList([module for _, module in found.values()]), taken, named


def with_modules(modules: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of `modules_taken`."""

    def leaf(value: Any) -> Any:
        return modules[value.index] if type(value) is ModulePlace else value

    return fill(tuple(args), leaf), {key: fill(value, leaf) for key, value in kwargs.items()}


def is_said(value: Any) -> bool:
    """Whether a value is written as it is, not as an object of plain data."""
    return isinstance(value, (torch.Tensor, torch.nn.Module)) or (has_codec(value) and not carries_more(value))
