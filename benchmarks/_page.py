"""docs/figures.md, made from the records of benchmarks/records and the texts of `benchmarks._about`.

A record is a processor: what each program told there last. `python -m benchmarks` writes the record of the processor that it runs on, the
page, and its picture of training steps; `python -m benchmarks page` writes page and picture alone.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks._about import ABOUT, HEAD, About
from benchmarks._picture import training_steps

__all__ = ["PAGE", "RECORDS", "page", "picture", "record", "records", "write"]

RECORDS = Path(__file__).with_name("records")
PAGE = Path(__file__).parents[1] / "docs" / "figures.md"
_VERSIONS = {"python": "Python", "torch": "torch", "onnxruntime": "onnxruntime"}


def records(folder: Path = RECORDS) -> list[dict[str, Any]]:
    """Every record: its `processor`, its `cores` and its `programs`.

    Raises:
        ValueError: A file is no record, or tells of a program that `benchmarks._about` does not know.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        one = json.loads(path.read_text())
        if set(one) != {"processor", "cores", "programs"} or not set(one["programs"]) <= set(ABOUT):
            raise ValueError(f"{path} is no record of benchmarks, or has a program without a text in benchmarks/_about.py")
        found.append(one)
    return sorted(found, key=lambda one: one["processor"])


def record(told: dict[str, Any], folder: Path = RECORDS) -> Path | None:
    """Put what a program told in the place of what it told before on this processor.

    Args:
        told: The line of JSON that the program prints.
        folder: Where the records are.

    Returns:
        The record; None where the program told nothing, which changes no record.
    """
    if "error" in told or not told["figures"]:
        return None
    machine = told["machine"]
    processor = re.sub(r"\((?:R|TM|C)\)", "", machine.get("cpu") or "unknown processor").strip()
    path = folder / f"{re.sub(r'[^a-z0-9]+', '-', processor.lower()).strip('-')}.json"
    one = json.loads(path.read_text()) if path.exists() else {"processor": processor, "cores": machine["cores"], "programs": {}}
    versions = {name: machine[name] for name in _VERSIONS if name in machine}
    one["programs"][told["program"]] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": versions,
        "note": "",
        "figures": told["figures"],
    }
    one["programs"] = dict(sorted(one["programs"].items()))
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps(one, indent=1) + "\n")
    return path


def write() -> None:
    """The page and its picture."""
    found = records()
    PAGE.write_text(page(found), encoding="utf-8")
    if (drawn := picture(found)) is not None:
        PAGE.with_name(ABOUT["training_step"].picture).write_text(drawn, encoding="utf-8")


def picture(found: Sequence[dict[str, Any]]) -> str | None:
    """The training steps of the record that has the newest ones, as an SVG; None where none has."""
    told = [(one["programs"]["training_step"], one) for one in found if "training_step" in one["programs"]]
    if not told:
        return None
    result, one = max(told, key=lambda pair: (pair[0]["date"], pair[1]["processor"]))
    machine = {"cpu": one["processor"], "cores": one["cores"], **result["versions"]}
    return training_steps([{"program": "training_step", "machine": machine, "figures": result["figures"]}])


def page(found: Sequence[dict[str, Any]]) -> str:
    """The page, as Markdown. Equal records make equal text."""
    lines = [HEAD]
    for program, about in ABOUT.items():
        told = [(one, one["programs"][program]) for one in found if program in one["programs"]]
        if not told:
            continue
        lines += [f"## {about.title}", "", about.text.strip(), "", f"Run it: `{about.command or f'python -m benchmarks.{program}'}`", ""]
        if about.picture:
            lines += [f"![{about.title}]({about.picture})", ""]
        for one, result in told:
            lines += [_where(one, result), "", *_tables(about, result["figures"])]
        if about.short:
            lines += ["**What falls short, and why.**", "", about.short.strip(), ""]
    return "\n".join(lines).rstrip() + "\n"


def _where(one: dict[str, Any], result: dict[str, Any]) -> str:
    versions = ", ".join(f"{said} {result['versions'][name]}" for name, said in _VERSIONS.items() if name in result["versions"])
    note = f" {result['note']}" if result["note"] else ""
    return f"**{one['processor']}**, {one['cores']} cores, {versions}, {result['date']}.{note}"


def _tables(about: About, figures: list[dict[str, Any]]) -> Iterator[str]:
    """A table of rows and columns, where about says that names are `row: column`, and one of what is left."""
    apart = [(*figure["what"].partition(": ")[::2], figure) for figure in figures] if about.pivot else []
    if about.pivot == "columns":
        apart = [(column, row, figure) for row, column, figure in apart]
    rows = [row for row, column, _ in apart if column and row]
    shared = {
        column for row, column, _ in apart if row and column and sum(other == column for _, other, _ in apart) > 1 and rows.count(row) > 1
    }
    whole = {row for row, column, _ in apart if column in shared}
    inside = [(row, column, figure) for row, column, figure in apart if column in shared or (about.pivot == "rows" and row in whole)]
    if inside:
        yield from _pivoted(about, inside)
    taken = {id(figure) for *_, figure in inside}
    if left := [figure for figure in figures if id(figure) not in taken]:
        yield from _listed(left)


def _pivoted(about: About, cells: list[tuple[str, str, dict[str, Any]]]) -> Iterator[str]:
    columns = list(dict.fromkeys(column for _, column, _ in cells))
    by_row: dict[str, dict[str, dict[str, Any]]] = {}
    for row, column, figure in cells:
        by_row.setdefault(row, {})[column] = figure
    notes = {row: "; ".join(dict.fromkeys(f["note"] for f in found.values() if f["note"])) for row, found in by_row.items()}
    noted = any(notes.values()) and about.pivot == "rows"
    yield "| what | " + " | ".join(_plain(about.names.get(column, column)) for column in columns) + (" | note |" if noted else " |")
    yield "|---|" + "---:|" * len(columns) + ("---|" if noted else "")
    for row, found in by_row.items():
        values = " | ".join(_value(found[column]) if column in found else "" for column in columns)
        yield f"| {_plain(about.names.get(row, row))} | {values} |" + (f" {_plain(notes[row])} |" if noted else "")
    yield ""


def _listed(figures: list[dict[str, Any]]) -> Iterator[str]:
    noted = any(figure["note"] for figure in figures)
    yield "| what | measured | runs |" + (" note |" if noted else "")
    yield "|---|---:|---:|" + ("---|" if noted else "")
    for figure in figures:
        row = f"| {_plain(figure['what'])} | {_value(figure)} | {figure['runs'] or ''} |"
        yield row + (f" {_plain(figure['note'])} |" if noted else "")
    yield ""


def _value(figure: dict[str, Any]) -> str:
    """The number with its unit and, in brackets, its limit; bold where that is missed."""
    if figure["value"] is None:
        return "none"
    unit = "" if figure["unit"] in ("ratio", "") else f" {figure['unit']}"
    value = figure["value"]
    text = (
        f"{value:.2f}"
        if figure["unit"] == "ratio" and 0.01 <= abs(value) < 10
        else f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:.3g}"
    )
    text += unit
    limit = "" if figure["limit"] is None else f" ({figure['limit']:g})"
    return (f"**{text}**" if figure["missed"] else text) + limit


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
