"""pythonop doctor FILE."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from exporter.commands.arrays import read_arrays
from exporter.commands.run import sizes_of
from exporter.commands.run_file import feeds_of, sizes_hint
from exporter.commands.shared import one_message, reported, run_setups, show, status
from exporter.files.needs import Needs, needs_of
from exporter.files.proto import open_proto
from symbolics.text import clean, lookalike, marked, quoted

__all__ = ["doctor_file"]

#: How often the file is run, after a run that is not timed.
_RUNS = 10


def doctor_file(
    context: click.Context,
    file: Path,
    runs: bool,
    allow: tuple[str, ...],
    inputs: Path | None,
    dims: tuple[str, ...],
    providers: list[Any] | None,
    setups: tuple[str, ...],
    as_json: bool,
) -> None:
    """What a file needs; with ``runs`` the share of time that Python takes, with ``providers`` which of them runs what."""
    with reported(context):
        needs = needs_of(file)
        facts: dict[str, Any] = {"file": str(file), **needs.as_json()}
        if providers and not needs.damage:
            from exporter.runtime.placements import placements

            with status(f"opening {file}", as_json):
                facts["placements"] = placements(open_proto(file)[0], providers)
        if runs and not needs.damage:
            facts["time"] = _times(context, file, allow, inputs, dims, providers, setups, as_json)
    if as_json:
        click.echo(json.dumps(facts))
    else:
        show(_shown(needs, str(file), facts.get("time"), facts.get("placements")))
    if found := [*needs.damage, *([needs.invalid] if needs.invalid else [])]:
        for line in found if not as_json else ():
            click.echo(line, err=True)
        context.exit(1)


def _times(
    context: click.Context,
    file: Path,
    allow: tuple[str, ...],
    inputs: Path | None,
    dims: tuple[str, ...],
    providers: list[Any] | None,
    setups: tuple[str, ...],
    quiet: bool,
) -> dict[str, Any]:
    """Seconds of a run, and of it in calls of Python, by what they call."""
    from exporter.profiling.profile import profile

    proto, _ = open_proto(file)
    run_setups(setups)
    arrays, sizes = read_arrays(inputs) if inputs is not None else {}, sizes_of(dims)
    feeds = feeds_of(proto, arrays, sizes, 0)
    with status(f"running {file}", quiet), one_message(context, "the run", beside=sizes_hint(proto, arrays, sizes)):
        found = profile(file, feeds, allow=allow, runs=_RUNS, providers=providers)
    calls: dict[str, float] = {}
    for row in found.rows:
        if row.function:
            calls[row.function] = calls.get(row.function, 0.0) + row.seconds
    nodes = sum(row.seconds for row in found.rows)
    return {"run": found.seconds, "nodes": nodes, "python": found.python, "share": found.python / nodes if nodes else 0.0, "calls": calls}


def _shown(needs: Needs, title: str, time: dict[str, Any] | None, placed: dict[str, dict[str, int]] | None) -> RenderableType:
    """For a terminal. Texts of the file are rich Texts: markup in them is not read."""
    parts: list[RenderableType] = [Text(clean(title), style="bold"), *(Text(line) for line in _lines(needs, time))]
    if placed is not None:
        from exporter.runtime.placements import said_of_placements

        parts += [Text(clean(line, 400)) for line in said_of_placements(placed)]
    if needs.python:
        table = Table(pad_edge=False)
        for column in ("Needs Python", "Is", "Nodes", "Why", "Where"):
            table.add_column(column, overflow="fold")
        for each in needs.python:
            table.add_row(
                Text(marked(each.function, 200)), *(Text(clean(text)) for text in (each.kind, str(each.calls), each.reason, each.where))
            )
        parts.append(table)
    if time is not None and time["calls"]:
        table = Table(pad_edge=False)
        for column in ("Calls", "ms", "Share"):
            table.add_column(column, overflow="fold")
        for name, seconds in sorted(time["calls"].items(), key=lambda item: -item[1]):
            table.add_row(Text(marked(name, 200)), f"{seconds * 1e3:.3g}", f"{seconds / time['nodes']:.1%}" if time["nodes"] else "")
        parts.append(table)
    return Group(*parts)


def _lines(needs: Needs, time: dict[str, Any] | None) -> Iterator[str]:
    count = sum(each.calls for each in needs.python)
    beside = f", and {needs.gradients} for their gradients" if needs.gradients else ""
    if needs.damage:
        yield "the file is damaged, or its data is not there: nothing can open it so"
    elif needs.invalid:
        yield "the file is not valid ONNX: a runtime need not open it"
    elif needs.runs_anywhere:
        yield f"none of its {needs.nodes} nodes needs Python: any runtime that knows ONNX functions runs it"
    elif count or needs.gradients:
        yield f"{count} of its {needs.nodes} nodes need Python{beside}: it runs with pythonop, on onnxruntime and onnx.reference alone"
    else:
        yield f"none of its {needs.nodes} nodes needs Python"
    if needs.data and not needs.damage:
        yield f"its values are in {', '.join(clean(each.location, 200) for each in needs.data[:8])}{', ...' if len(needs.data) > 8 else ''} too: keep that beside it"
    if needs.domains:
        yield f"a runtime has to know the operators of {', '.join(clean(name, 60) for name in needs.domains[:8])}"
    if needs.allow:
        yield f"allow=[{', '.join(quoted(name, 1000) for name in needs.allow)}]{lookalike(*needs.allow)}"
    if any(each.kind == "Function" for each in needs.python) and not needs.damage:
        yield "a Function of plain torch operators needs no Python in a file that is exported with portable=True (--portable), which says of the others why"
    if time is not None:
        yield f"one run takes {time['run'] * 1e3:.3g} ms; of the time in nodes {time['share']:.1%} is Python's"
