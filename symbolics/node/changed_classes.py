"""Errors for a class that a file holds values of, and that has changed since."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from symbolics.errors import Faq, FormatError
from symbolics.node.classes import look
from symbolics.text import clean

__all__ = ["check_count", "member_of", "other_fields"]


def _changed(name: str, what: str) -> FormatError:
    return FormatError(
        f"{clean(name)} is another class than at the export: {what}\n"
        "  way out: bring back the class as it was, or export again; for the next change, make a new class and leave the old one",
        faq=Faq.CHANGED,
    )


def _listed(names: Collection[str]) -> str:
    some = ", ".join(clean(name, 60) for name in sorted(names)[:5])
    return some + (", ..." if len(names) > 5 else "")


def other_fields(name: str, of_file: Collection[str], here: Collection[str]) -> FormatError:
    """The error for a dataclass that has not the fields which the file gives.

    Args:
        name: Its name in the file.
        of_file: The fields of the file.
        here: Those of the class.
    """
    said = [
        f"{what} {_listed(names)}"
        for what, names in (
            ("the file has no value for its field", set(here) - set(of_file)),
            ("it has no field", set(of_file) - set(here)),
        )
        if names
    ]
    return _changed(name, "; ".join(said) or "it was no dict, or is one now")


def check_count(name: str, of_file: Collection[Any], here: Collection[str]) -> None:
    """Compare how many fields a NamedTuple has.

    Raises:
        FormatError: The file has values for another number of fields.
    """
    if len(of_file) != len(here):
        raise _changed(name, f"it has the {len(here)} fields {_listed(here)}, the file {len(of_file)} values")


def member_of(cls: type, name: str, member: str) -> Any:
    """The member of an enum by its name.

    Raises:
        FormatError: It has none of that name.
    """
    members = look(cls, "_member_map_")
    if member not in members:
        raise _changed(name, f"it has no member {clean(member, 60)}; its members are {_listed(members)}")
    return members[member]
