"""The number of a call of a Function, which a PythonOp and what reads its context say: nodes that stand in a function for several calls say one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Numbers", "number_in", "with_number"]


def number_in(text: str | bytes) -> str | None:
    """The number that a ``call`` attribute says; None of a damaged one, of which its reader will tell."""
    try:
        number = json.loads(text)["id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return number if isinstance(number, str) else None


def with_number(text: str | bytes, number: str) -> str:
    """The same attribute with another number."""
    return json.dumps({**json.loads(text), "id": number}, separators=(",", ":"))


@dataclass
class Numbers:
    """Gives each call of a graph a number of its own again, once functions are inlined: runtimes make one node of two that are equal.

    Attributes:
        taken: The numbers so far.
        told: The name of a context -> its call's new number.
    """

    taken: set[str] = field(default_factory=set)
    told: dict[str, str] = field(default_factory=dict)

    def of(self, text: str | bytes, begins: bool, inputs: Iterable[str], outputs: Iterable[str]) -> str | None:
        """The attribute as it should be, None where it may stay.

        Args:
            text: The attribute of the next node.
            begins: Whether it is a PythonOp, and no reader of a context.
            inputs, outputs: The names of what the node reads and makes.
        """
        said = number_in(text)
        if said is None:
            return None
        number = None if begins else self.told.get(next(iter(inputs), ""))
        if begins and said in self.taken:
            number = next(name for i in itertools.count(1) if (name := f"{said}/{i}") not in self.taken)
        self.taken.add(number or said)
        if number is None:
            return None
        self.told.update((name, number) for name in outputs if name)  # the context among them
        return with_number(text, number)
