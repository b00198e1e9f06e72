"""Functions that are others here than when the file was exported: their fingerprints say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from symbolics.errors import Faq, RunError
from symbolics.node.fingerprints import changed_halves
from symbolics.node.metadata import read_functions
from symbolics.text import shown
from symbolics.users import warn

__all__ = ["changed_functions", "say_changed"]

# Functions that one message names.
_NAMED = 5


def changed_functions(metadata: Mapping[str, str], functions: Mapping[str, Any]) -> dict[str, list[str]]:
    """Which halves, "forward" and "backward", of which Functions are others than at the export.

    Args:
        metadata: Of the file.
        functions: What its nodes' names have led to. Nothing else that the file names is looked for.

    Raises:
        FormatError: The metadata is damaged.
    """
    recorded = read_functions(metadata)
    found = {name: changed_halves(recorded[name], functions[name]) for name in recorded if name in functions}
    return {name: halves for name, halves in found.items() if halves}


def say_changed(changed: Mapping[str, list[str]], *, strict: bool) -> None:
    """Warn once of Functions that have changed.

    Args:
        changed: As `changed_functions` gives them.
        strict: Raise instead.

    Raises:
        RunError: With ``strict``, one has changed.
    """
    if not changed:
        return
    named = [f"the {' and the '.join(halves)} of {shown(name)}" for name, halves in changed.items()]
    more = f" and of {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    have = "has" if sum(map(len, changed.values())) == 1 else "have"
    said = f"{', '.join(named[:_NAMED])}{more} {have} changed since the file was exported"
    way_out = "export the model again, bring the old code back, or see what differs with exporter.verify(model, args, file=...)"
    if strict:
        raise RunError(f"{said}: {way_out}", faq=Faq.CHANGED)
    warn(f"{said}: {way_out}. strict=True makes this an error.")
