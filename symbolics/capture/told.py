"""What a forward writes into a list, dict or dataclass among its arguments, for its caller to read.

A capture runs a forward on copies of its arguments, and more often than the model calls it. What one run wrote into the copies is
written into the caller's own containers once. A tensor made in the forward has no place in the graph, unless it is returned as well, and a number that other
inputs change would be a constant of the file: an `Unseen` stands for both, and using it is an error.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from symbolics.errors import ExportError, Faq
from symbolics.node.containers import Slot, containers_in, fill, is_dataclass

__all__ = ["Told", "Unseen", "Watch", "agreed", "tell"]


class Unseen:
    """What a forward wrote for its caller and a file cannot hold. It may lie in its container; every use of it is an error.

    Args:
        what: The value and how it came there, for the error.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol that it lacks, as copy and numpy ask for
            raise AttributeError(name)
        raise self._error()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found: list[Unseen] = []
        fill((tuple(args), dict(kwargs or {})), lambda leaf: found.append(leaf) if isinstance(leaf, Unseen) else None)
        raise found[0]._error()

    def _error(self, how: str = "uses it: a file has only what forward returns. Return it as a tensor") -> ExportError:
        return ExportError(f"{self._what}, and the model {how}", faq=Faq.PYTHON_VALUE)

    @classmethod
    def check_returned(cls, result: Any) -> None:
        """Refuse a model's result that holds one.

        Raises:
            ExportError: It does.
        """
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, cls):
                raise leaf._error(
                    "returns it: outputs of a file are tensors. Return a tensor from that forward (x.sum(), not x.sum().item()), or leave it out of "
                    "what the model returns"
                )


def _refused(self: Unseen, *args: Any) -> Any:
    raise self._error()


_USES = "bool float int index len iter getitem contains lt le gt ge neg pos abs invert round"
_SIDED = "add sub mul truediv floordiv mod pow matmul and or xor"
for _name in (*_USES.split(), *_SIDED.split(), *(f"r{name}" for name in _SIDED.split())):
    setattr(Unseen, f"__{_name}__", _refused)


@dataclass(frozen=True)
class Told:
    """One container that a forward changed.

    Attributes:
        container: The caller's own.
        content: What it holds afterwards, a list or a dict of fields. A `Slot` is an output of the call, an `Unseen` what no file can hold.
    """

    container: Any
    content: Any


class Watch:
    """Sees what one run changes in the containers among its arguments.

    Args:
        given: The arguments of the caller.
        copies: Those of the run: copies of the same containers, with other leaves.
    """

    def __init__(self, given: Any, copies: Any) -> None:
        pairs = zip(containers_in(given), containers_in(copies), strict=True)
        self._pairs = [(one, copy, _content(copy)) for one, copy in pairs if one is not copy and _content(copy) is not None]

    def told(self, known: Sequence[tuple[Any, Any]], results: Sequence[torch.Tensor], name: str) -> list[Told]:
        """What the run changed.

        Args:
            known: (a value of the run, the caller's that it stands for).
            results: The tensors that the call returned.
            name: Of the Function.
        """
        own = {id(copy): one for one, copy, _ in self._pairs}
        own |= {id(stand_in): value for stand_in, value in known if isinstance(stand_in, torch.Tensor)}
        outputs = {id(tensor): index for index, tensor in enumerate(results)}

        def leaf(value: Any) -> Any:
            if id(value) in outputs:
                return Slot(outputs[id(value)])
            if isinstance(value, torch.Tensor) and id(value) not in own:
                return Unseen(f"{name}'s forward puts a tensor that it does not return into an argument")
            return own.get(id(value), value)

        found = []
        for one, copy, before in self._pairs:
            after = _content(copy)
            if not _same(before, after):
                found.append(Told(one, _each(after, lambda item: own[id(item)] if id(item) in own else fill(item, leaf))))
        return found


def agreed(first: list[Told], others: list[list[Told]], name: str) -> list[Told]:
    """What a run told, with an `Unseen` for what runs on other values or sizes told otherwise."""

    def other(value: Any, key: Any) -> Unseen:
        return Unseen(f"{name}'s forward puts a value computed from its inputs ({value!r:.40} in one run) at {key!r} of an argument")

    for told in others:
        by_container = {id(each.container): each.content for each in told}
        merged = []
        for each in first:
            content: Any = by_container.get(id(each.container))
            keys, same_keys = _keys(each.content), content is not None and _keys(each.content) == _keys(content)
            kept = [isinstance(each.content[key], Unseen) or (same_keys and _agree(each.content[key], content[key])) for key in keys]
            items = [each.content[key] if keep else other(each.content[key], key) for key, keep in zip(keys, kept, strict=True)]
            merged.append(Told(each.container, dict(zip(keys, items, strict=True)) if isinstance(each.content, dict) else items))
        first = merged
    return first


def tell(told: Sequence[Told], results: Sequence[Any]) -> None:
    """Write what a forward told into the caller's containers, with the outputs of the captured call in their places."""
    for each in told:
        content = _each(each.content, lambda item: fill(item, lambda leaf: results[leaf.index] if isinstance(leaf, Slot) else leaf))
        if isinstance(each.container, list):
            each.container[:] = content
        elif type(each.container) in (dict, OrderedDict):
            each.container.clear()
            each.container.update(content)
        else:
            vars(each.container).update(content)


def _content(container: Any) -> Any:
    """A shallow copy of what a container holds; None where it cannot change, or not in a way that is followed."""
    if type(container) is list:
        return list(container)
    if type(container) in (dict, OrderedDict):
        return dict(container)
    return dict(vars(container)) if is_dataclass(container) and hasattr(container, "__dict__") and not isinstance(container, dict) else None


def _keys(content: Any) -> list[Any]:
    return list(content) if isinstance(content, dict) else list(range(len(content)))


def _each(content: Any, change: Callable[[Any], Any]) -> Any:
    return {key: change(item) for key, item in content.items()} if isinstance(content, dict) else [change(item) for item in content]


def _same(one: Any, two: Any) -> bool:
    return _keys(one) == _keys(two) and all(map(operator.is_, _items(one), _items(two)))


def _items(content: Any) -> Iterator[Any]:
    return iter(content.values() if isinstance(content, dict) else content)


def _agree(one: Any, two: Any) -> bool:
    """Whether two runs told the same: their plain values are equal."""
    leaves: list[list[Any]] = [[], []]
    for value, found in zip((one, two), leaves, strict=True):
        fill(value, found.append)
    return len(leaves[0]) == len(leaves[1]) and all(map(_equal, *leaves))


def _equal(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, (np.ndarray, np.generic)):
        return np.array_equal(one, two)
    return not isinstance(one, (bool, int, float, complex, str, bytes, Slot)) or one == two or one != one
