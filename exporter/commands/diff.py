"""pythonop diff."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from exporter.commands.shared import json_option, loudness, reported, show
from exporter.differences.diff import Change, Difference, diff_files
from exporter.differences.weights import WeightChange
from symbolics.text import clean

__all__ = ["diff", "render"]

_SIGNS = {"removed": ("-", "red"), "added": ("+", "green"), "changed": ("~", "yellow")}
_TITLES = {
    "interface": "inputs and outputs",
    "opsets": "versions",
    "nodes": "nodes",
    "functions": "ONNX functions",
    "weights": "weights that one file has",
    "calls": "PythonOps and portable functions",
    "links": "backward of ONNX functions",
    "gradients": "gradients",
    "metadata": "metadata",
}


@click.command()
@click.argument("first", metavar="A", type=click.Path(path_type=Path))
@click.argument("second", metavar="B", type=click.Path(path_type=Path))
@click.option("--all", "everything", is_flag=True, help="Print every line. Default: at most 20 in each section.")
@json_option
@loudness
@click.pass_context
def diff(context: click.Context, first: Path, second: Path, everything: bool, as_json: bool) -> None:
    """Say what differs between two ONNX files: inputs, operators, nodes, weights, PythonOps, gradients, metadata.

    Names of values and nodes, and the order of nodes, are no difference. Nothing of the files is run or imported, and torch is not needed.
    The exit status is 0 where they are equal, 1 where they differ.
    """
    with reported(context):
        found = diff_files(first, second)
        if as_json:
            click.echo(json.dumps(found.as_json()))
        else:
            show(render(found, str(first), str(second), None if everything else 20))
        if not found.equal:
            context.exit(1)


def render(found: Difference, first: str, second: str, limit: int | None = 20) -> RenderableType:
    """What differs, for a terminal, at most ``limit`` lines of each section. Texts of the files are rich Texts: markup in them is not read."""
    if found.equal:
        return Text(f"{clean(first)} and {clean(second)} are equal")
    parts: list[RenderableType] = [Text(f"- {clean(first)}", style="bold"), Text(f"+ {clean(second)}", style="bold")]
    if found.operators:
        grid = Table.grid(padding=(0, 2))
        rows = [(Text(f"  {clean(name)}"), Text(f"{a} -> {b}"), Text(f"{b - a:+}")) for name, (a, b) in found.operators.items()]
        for row in rows[:limit]:
            grid.add_row(*row)
        parts += [Text("operators", style="bold"), grid, *_more(len(rows), limit)]
    for key, title in _TITLES.items():
        if changes := getattr(found, key):
            parts += [Text(title, style="bold"), *(_line(change) for change in changes[:limit]), *_more(len(changes), limit)]
    if found.values:
        parts += [Text("values of weights", style="bold"), _values(found.values[:limit]), *_more(len(found.values), limit)]
    return Group(*parts)


def _more(count: int, limit: int | None) -> Iterator[Text]:
    if limit is not None and count > limit:
        yield Text(f"  and {count - limit} more: --all prints them", style="dim")


def _line(change: Change) -> Text:
    sign, style = _SIGNS[change.kind]
    text = (
        change.a
        if change.kind == "removed"
        else change.b
        if change.kind == "added"
        else f"{change.a or 'nothing'} -> {change.b or 'nothing'}"
    )
    return Text(f"  {sign} {change.what}" + (f"  {text}" if text else ""), style=style)


def _values(rows: list[WeightChange]) -> Table:
    table = Table(pad_edge=False)
    table.add_column("Weight", overflow="fold")
    table.add_column("Type", overflow="fold")
    for heading in ("Largest difference", "Relative", "Elements with equal bits"):
        table.add_column(heading, justify="right")
    for row in rows:
        kind = row.type_a if row.type_a == row.type_b else f"{row.type_a} -> {row.type_b}"
        numbers = ["" if each is None else f"{each:.1e}" for each in (row.max_abs, row.max_rel)]
        equal = "" if row.equal is None else f"{row.equal} of {row.elements}"
        table.add_row(*map(Text, (clean(row.name), kind, *numbers, equal)))
    return table
