"""The subscripts of an Einsum."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["axes_in_order"]


def axes_in_order(terms: Sequence[str]) -> list[list[int]]:
    """Of each operand, its axes in the order in which their letters come first in the equation."""
    order: dict[str, int] = {}
    for term in terms:
        for letter in term:
            order.setdefault(letter, len(order))
    return [sorted(range(len(term)), key=lambda axis: order[term[axis]]) for term in terms]
