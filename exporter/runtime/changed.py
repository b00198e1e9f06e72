"""Functions that are others here than when the file was exported: their fingerprints say so, or values that they read beside their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from symbolics.errors import Faq, RunError
from symbolics.node.fingerprints import changed_halves
from symbolics.node.metadata import read_functions, read_values
from symbolics.node.outside_values import other_values, outside_values
from symbolics.text import BEFORE_OPENING, shown
from symbolics.users import warn

__all__ = ["changed_functions", "named", "say_changed"]

# What one message names.
_NAMED = 5
_HALVES = ("forward", "backward")


def changed_functions(metadata: Mapping[str, str], functions: Mapping[str, Any]) -> dict[str, list[str]]:
    """What is other than at the export.

    Args:
        metadata: Of the file.
        functions: What its nodes' names have led to. Nothing else that the file names is looked for.

    Returns:
        The name of a Function -> its halves whose code is another one, "forward" and "backward", and a text for each value that it reads, of its
        class or module, and that is another one: ``mypkg.ops:Spike.alpha is 1.0 and was 3.0``.

    Raises:
        FormatError: The metadata is damaged.
    """
    recorded, values = read_functions(metadata), read_values(metadata)
    found = {name: changed_halves(recorded[name], functions[name]) for name in recorded if name in functions}
    for name in values.keys() & functions.keys():
        others = other_values(values[name], outside_values(functions[name]))
        found.setdefault(name, []).extend(
            f"{shown(label)} is {shown(repr(now))} and was {shown(repr(before))}" for label, now, before in others
        )
    return {name: changes for name, changes in found.items() if changes}


def named(changed: Mapping[str, list[str]]) -> tuple[list[str], list[str]]:
    """What has changed, in words: the halves of each Function, and the values."""
    codes = {name: [each for each in changes if each in _HALVES] for name, changes in changed.items()}
    values = dict.fromkeys(each for changes in changed.values() for each in changes if each not in _HALVES)
    return [f"the {' and the '.join(halves)} of {shown(name)}" for name, halves in codes.items() if halves], list(values)


def say_changed(changed: Mapping[str, list[str]], *, strict: bool) -> None:
    """Warn once of Functions that have changed, and once of values that they read.

    Args:
        changed: As `changed_functions` gives them.
        strict: Raise instead.

    Raises:
        RunError: With ``strict``, one has changed.
    """
    codes, values = named(changed)
    one = len(codes) == 1 and " and the " not in codes[0]
    _say(codes, f"{'has' if one else 'have'} changed since the file was exported", _WAY_OUT, strict)
    _say(values, "when the file was exported, and Functions in the file read it", _WAY_OUT_OF_VALUES, strict)


_WAY_OUT = "export the model again, bring the old code back, or see what differs with exporter.verify(model, args, file=...)"
_WAY_OUT_OF_VALUES = f"set it before the file is opened ({BEFORE_OPENING}), or pass it to apply() as an argument and export again"


def _say(items: list[str], what: str, way_out: str, strict: bool) -> None:
    if not items:
        return
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    said = f"{', '.join(items[:_NAMED])}{more} {what}"
    if strict:
        raise RunError(f"{said}: {way_out}", faq=Faq.CHANGED)
    warn(f"{said}: {way_out}. strict=True makes this an error.")
