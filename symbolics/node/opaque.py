"""What ``opaque=`` of an export names: operators, modules and functions that become one PythonOp each."""

from __future__ import annotations

from typing import Any

from symbolics.node.names import is_operator
from symbolics.node.patterns import Patterns, listed, pattern_of

__all__ = ["MISSING", "Opaque"]

#: The entry for all operators that the export meets and that it has no translation of.
MISSING = "missing"


class Opaque:
    """The entries of ``opaque=``, by their kind.

    - ``missing``: every operator that the export meets and cannot translate.
    - ``aten::name``, ``aten::name.overload``, ``aten::linalg_*``, an overload or packet of ``torch.ops``: operators, translated or not.
    - a module, a class of modules, a function, ``mypkg.ops:Block``, ``mypkg.ops:function``, ``Block``: their calls.

    Attributes:
        missing: Whether ``missing`` is among them.
        operators: Those that mean operators.
        calls: Those that mean modules and functions.
    """

    def __init__(self, items: Any = ()) -> None:
        """Args:
            items: What ``opaque=`` was given; one alone may stand without a list.

        Raises:
            TypeError: An entry is of none of these kinds.
            ArgumentError: A pattern lacks one of its parts.
        """
        entries = [pattern_of(item) for item in listed(items)]
        operators = [item for item in entries if isinstance(item, str) and is_operator(item)]
        calls = [item for item in entries if not any(item is each for each in operators)]
        self.missing = any(isinstance(item, str) and item == MISSING for item in calls)
        self.operators = Patterns(operators, "opaque")
        self.calls = Patterns([item for item in calls if not (isinstance(item, str) and item == MISSING)], "opaque")

    def __bool__(self) -> bool:
        """Whether anything is named at all."""
        return self.missing or bool(self.operators.items or self.calls.items)

    @property
    def items(self) -> list[Any]:
        """All entries, as an `Opaque` takes them."""
        return [*([MISSING] if self.missing else []), *self.operators.items, *self.calls.items]

    def meet_as(self, other: Opaque) -> None:
        """Count as met what another, which has these entries too, has met."""
        self.operators.meet_as(other.operators)
        self.calls.meet_as(other.calls)

    def check_met(self) -> None:
        """See that each entry meant something that the export met; ``missing`` may mean nothing.

        Raises:
            ArgumentError: One of them meant nothing; the message names near ones.
        """
        self.operators.check_met()
        self.calls.check_met()
