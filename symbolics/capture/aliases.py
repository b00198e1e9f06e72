"""Tensors that share memory in eager mode and not in a graph: a change of one in place would not reach the other.

A node's output is a value of its own, also where the Function returned its input or a view of it; so is what a stop-gradient mark
makes of ``x.detach()``. Nothing is lost until one of the two is changed in place and the other is read: that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.errors import ExportError, Faq

__all__ = ["Aliases", "is_whole"]


@dataclass
class Aliases:
    """What is known of one export.

    Attributes:
        pairs: Two tensors that share memory in eager mode alone, why, and the way out.
        stale: Tensors whose value in the graph is not eager's any more, why, and the way out.
        looks: A tensor that ``x.detach()`` or ``x.data`` gave, and x.
        kept: The memory of what autograd may read in a backward, by `symbolics.torch_private.storage_ref`.
    """

    pairs: list[tuple[torch.Tensor, torch.Tensor, str, str]] = field(default_factory=list)
    stale: list[tuple[torch.Tensor, str, str]] = field(default_factory=list)
    looks: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    kept: set[Hashable] = field(default_factory=set)

    def change(self, tensor: torch.Tensor, what: str) -> None:
        """A tensor is changed in place: what shares its memory in eager mode alone is stale from here on.

        Args:
            tensor: The tensor.
            what: What changed it.
        """
        todo, left = [tensor], list(self.pairs)
        while todo and left:
            changed, rest = todo.pop(), []
            for pair in left:
                one, other, why, way_out = pair
                if _are_one(changed, one) or _are_one(changed, other):
                    stale = other if _are_one(changed, one) else one
                    self.stale.append((stale, f"{what} changed its memory in place through another tensor ({why})", way_out))
                    todo.append(stale)
                else:
                    rest.append(pair)
            left = rest

    def looked_at(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What ``x.detach()`` or ``x.data`` gave, if a tensor is that or a view of it, and x; None if it is neither."""
        return next((pair for pair in reversed(self.looks) if _are_one(pair[0], tensor)), None)

    def part(self, x: torch.Tensor) -> None:
        """x has other memory now: what looked at the old one has nothing in common with it any more."""
        self.pairs = [pair for pair in self.pairs if pair[0] is not x and pair[1] is not x]
        self.looks = [pair for pair in self.looks if pair[1] is not x]

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors are read by a call that autograd sees: its backward may read them."""
        self.kept.update(key for tensor in tensors if (key := private.storage_ref(tensor)) is not None)

    def written_through(self, look: torch.Tensor, x: torch.Tensor, what: str) -> None:
        """A change of what ``x.detach()`` gave was made to x, too: those two agree, all else that shares their memory is stale."""
        between = [pair for pair in self.pairs if (pair[0] is look and pair[1] is x)]
        self.pairs = [pair for pair in self.pairs if not any(pair is each for each in between)]
        for tensor in (look, x):
            self.change(tensor, what)
        self.pairs += between

    def check_apart(self, changed: Iterable[int], tensors: Sequence[Any], name: Callable[[int], str]) -> None:
        """Refuse a call that changes an argument which shares memory with another one: a node gets each in memory of its own.

        Args:
            changed: Which of the arguments the call changes in place.
            tensors: Its arguments; what is no tensor has no memory.
            name: The name of an argument, by number.

        Raises:
            ExportError: One of them does.
        """
        for i in changed:
            reach = self._reached_from(tensors[i])
            for j, other in enumerate(tensors):
                if j != i and isinstance(other, torch.Tensor) and any(_overlap(each, other) for each in reach):
                    one, two = sorted((name(i), name(j)))
                    places = f"twice in argument {one}" if one == two else f"as argument {one} and as argument {two}"
                    rest = "another tensor of that argument" if one == two else f"argument {name(j)}"
                    what = (
                        f"a tensor in place that it is given {places}"  # nobody can tell as which of them it was changed
                        if other is tensors[i]
                        else f"argument {name(i)} in place, which shares memory with {rest}"
                    )
                    raise ExportError(
                        f"it changes {what}: in eager mode a change of one is a change of both, and a node gets each in memory of its own: "
                        "pass a copy of one of them (x.clone())"
                    )

    def _reached_from(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A tensor, and those that share its memory in eager mode alone."""
        reach = [tensor]
        for one in reach:
            for a, b, *_ in self.pairs:
                other = b if _are_one(one, a) else a if _are_one(one, b) else None
                if other is not None and not any(other is each for each in reach):
                    reach.append(other)
        return reach

    def check_read(self, tensors: Iterable[torch.Tensor]) -> None:
        """Refuse to read what is stale.

        Raises:
            ExportError: One of the tensors shares memory with it.
        """
        for tensor in tensors if self.stale else ():
            for stale, why, way_out in self.stale:
                if _are_one(tensor, stale):
                    raise ExportError(
                        f"a tensor is read after {why}, and a file would read its old value: {way_out}", faq=Faq.CHANGED_IN_PLACE
                    )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have an element in common; True where sizes are not known."""
    if not _are_one(one, other):
        return False
    with private.paused_capture(), private.real_tensors():
        ends = []
        for tensor in (one, other):
            start, shape, strides = tensor.storage_offset(), tensor.shape, tensor.stride()
            if any(type(n) is not int for n in (start, *shape, *strides)) or tensor.itemsize != one.itemsize:
                return True
            if 0 in shape:
                return False
            ends.append((start, start + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))))
        (first, last), (start, end) = ends
        if last < start or end < first:
            return False
        marked = torch.zeros(max(last, end) + 1 - min(first, start), dtype=torch.bool)
        marked.as_strided(one.shape, one.stride(), first - min(first, start)).fill_(True)
        return bool(marked.as_strided(other.shape, other.stride(), start - min(first, start)).any())


def is_whole(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one memory have the same elements, in one order."""
    with private.paused_capture():  # reading a shape is a node of a trace
        return _place(one) == _place(other)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _are_one(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or private.shares_memory(one, other)
