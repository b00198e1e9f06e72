"""Numbers that a forward returns beside its tensors: a file has one of them, so a number that moves with the inputs is of no use to the model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from symbolics.capture.told import Unseen
from symbolics.node.containers import Slot, fill

__all__ = ["handed_on", "moved_numbers", "numbers_of"]

_KINDS = (bool, int, float, complex, str, torch.Size)


def numbers_of(result: Any) -> list[Any]:
    """What a forward returned that is no tensor, in order; for each other leaf (None, an object) its type."""
    found: list[Any] = []

    def leaf(value: Any) -> None:
        if not isinstance(value, (torch.Tensor, Slot)):
            found.append(value if isinstance(value, _KINDS) else type(value))

    fill(result, leaf)
    return found


def moved_numbers(template: Any, others: Sequence[list[Any]]) -> dict[int, tuple[Any, Any]]:
    """The numbers that another run of a forward gave otherwise: place among `numbers_of` -> it, and that run's.

    Args:
        template: What forward returned, with `Slot`s for its tensors.
        others: `numbers_of` runs on other values and sizes.
    """
    mine, moved = numbers_of(template), dict[int, tuple[Any, Any]]()
    for other in others:
        if len(other) != len(mine):
            continue  # the number of outputs moves: that has an error of its own
        for index, (one, two) in enumerate(zip(mine, other, strict=True)):
            if not isinstance(one, type) and (type(one) is not type(two) or (one != two and one == one)):
                moved.setdefault(index, (one, two))
    return moved


def handed_on(template: Any, moved: Mapping[int, tuple[Any, Any]], results: Sequence[Any], who: str) -> Any:
    """What the model gets of a call: its results in their places, and an `Unseen` for each number that moves.

    Args:
        template: What forward returned, with `Slot`s for its tensors.
        moved: What `moved_numbers` found.
        results: Stand for the tensors.
        who: Begins the error of an `Unseen`.
    """
    places = itertools.count()

    def leaf(value: Any) -> Any:
        if isinstance(value, Slot):
            return results[value.index]
        if isinstance(value, torch.Tensor) or (index := next(places)) not in moved:
            return value
        one, two = moved[index]
        return Unseen(f"{who}: it returns a Python value computed from its inputs ({one!r:.60} in one run, {two!r:.60} in another)")

    return fill(template, leaf)
