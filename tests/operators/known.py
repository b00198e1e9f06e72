"""What is still wrong, each with its reason: a row that is mended must leave the list, one that breaks must not enter it."""

from __future__ import annotations

from collections.abc import Iterable

from tests.operators.sweep import Line

__all__ = ["KNOWN", "WRONG", "known", "unexpected"]

#: The words that no row may end in.
WRONG = ("wrong", "crash")
#: Operator, exporters, kinds of inputs, reason.
KNOWN: list[tuple[str, str, list[str], str]] = []


def known() -> dict[tuple[str, str, str], str]:
    """(operator, exporter, kind) -> the reason."""
    return {(name, which, kind): why for name, exporters, kinds, why in KNOWN for which in exporters.split() for kind in kinds}


def unexpected(found: Iterable[Line]) -> list[str]:
    """What differs between a record and the list: rows that are wrong and not in it, and rows of it that are not wrong."""
    listed, said = known(), []
    for line in found:
        for kind, (word, stage, why, _) in line.kinds.items():
            place = f"{line.operator} ({line.exporter}, {kind})"
            if word in WRONG and (line.operator, line.exporter, kind) not in listed:
                said.append(f"{place}: {word} in {stage}: {why}")
            if word not in (*WRONG, "kink") and (line.operator, line.exporter, kind) in listed:
                said.append(f"{place}: {word}: take it out of tests/operators/known.py")
    return said
