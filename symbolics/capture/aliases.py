"""Tensors that share memory in eager mode and not in a graph: a change of one in place would not reach the other.

A node's output is a value of its own, also where the Function returned its input or a view of it; so is what a stop-gradient mark
makes of ``x.detach()``. Nothing is lost until one of the two is changed in place and the other is read: that is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from symbolics import torch_private as private
from symbolics.errors import ExportError

__all__ = ["Aliases"]


@dataclass
class Aliases:
    """What is known of one export.

    Attributes:
        pairs: Two tensors that share memory in eager mode alone, why, and the way out.
        stale: Tensors whose value in the graph is not eager's any more, why, and the way out.
    """

    pairs: list[tuple[torch.Tensor, torch.Tensor, str, str]] = field(default_factory=list)
    stale: list[tuple[torch.Tensor, str, str]] = field(default_factory=list)

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

    def check_read(self, tensors: Iterable[torch.Tensor]) -> None:
        """Refuse to read what is stale.

        Raises:
            ExportError: One of the tensors shares memory with it.
        """
        for tensor in tensors if self.stale else ():
            for stale, why, way_out in self.stale:
                if _are_one(tensor, stale):
                    raise ExportError(f"a tensor is read after {why}, and a file would read its old value: {way_out}")


def _are_one(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or private.shares_memory(one, other)
