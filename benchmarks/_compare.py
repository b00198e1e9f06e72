"""Two runs of the benchmarks side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Row", "compare", "read", "table"]


class Row(NamedTuple):
    """One figure of two runs.

    Attributes:
        program, what, unit: Which figure.
        old, new: Its values; None where a run has none.
        was_missed, is_missed: Whether its limit was missed.
    """

    program: str
    what: str
    unit: str
    old: float | None
    new: float | None
    was_missed: bool
    is_missed: bool

    @property
    def newly_missed(self) -> bool:
        """Whether the new run misses a limit that the old one did not."""
        return self.is_missed and not self.was_missed

    @property
    def change(self) -> str:
        """The new value over the old one, as a percentage; "new" and "gone" where there is only one."""
        if self.old is None or self.new is None:
            return "" if self.old is self.new else "new" if self.old is None else "gone"
        return f"{100 * (self.new / self.old - 1):+.1f} %" if self.old else ""


def read(path: Path) -> list[dict[str, Any]]:
    """What the programs of one run told: of ``python -m benchmarks``, or the line of a single program.

    Raises:
        ValueError: The file is neither.
    """
    told = json.loads(path.read_text())
    told = [told] if isinstance(told, dict) else told
    if not isinstance(told, list) or not all(isinstance(result, dict) and "figures" in result and "program" in result for result in told):
        raise ValueError(f"{path} is not what python -m benchmarks writes: give one of its files of figures")
    return told


def compare(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[Row]:
    """Each figure of both, in the new run's order, then those that are gone. Programs that the new run did not run are left out."""

    def figures(told: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
        return {(result["program"], figure["what"]): figure for result in told for figure in result["figures"]}

    before, after = figures(old), figures(new)
    ran = {result["program"] for result in new}
    rows = []
    for key in dict.fromkeys((*after, *(key for key in before if key[0] in ran))):
        one, two = before.get(key, {}), after.get(key, {})
        missed = bool(one.get("missed")), bool(two.get("missed"))
        rows.append(Row(*key, (two or one)["unit"], one.get("value"), two.get("value"), *missed))
    return rows


def table(rows: list[Row]) -> str:
    """For people, as Markdown."""
    lines = ["| | old | new | change | |", "|---|---:|---:|---:|---|"]
    for row in rows:
        old, new = ("" if value is None else f"{value:.4g} {row.unit}".strip() for value in (row.old, row.new))
        said = "**newly missed**" if row.newly_missed else "missed" if row.is_missed else "reached again" if row.was_missed else ""
        lines.append(f"| {row.program}: {row.what} | {old} | {new} | {row.change} | {said} |")
    return "\n".join(lines)
