"""pythonop inspect."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from exporter.commands.shared import json_option, loudness, reported, show
from exporter.files import summary
from exporter.files.inspect import CallFacts, FileFacts, inspect_file
from symbolics.text import clean, escaped, marked

__all__ = ["inspect", "render"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--calls", is_flag=True, help="Also show every call: its arguments, tensors, flags, module and source line.")
@json_option
@loudness
@click.pass_context
def inspect(context: click.Context, file: Path, calls: bool, as_json: bool) -> None:
    """Show what an ONNX FILE is, and its calls of autograd Functions. Nothing of the file is run or imported, and torch is not needed."""
    with reported(context):
        facts = inspect_file(file)
        if as_json:
            click.echo(json.dumps(facts.as_json()))
        else:
            show(render(facts, str(file), calls))
        if damage := facts.damage():
            for line in damage if not as_json else ():
                click.echo(line, err=True)
            context.exit(1)


def render(facts: FileFacts, title: str = "", calls: bool = True) -> RenderableType:
    """What a file says, for a terminal. Texts of the file are rich Texts: markup in them is not read."""
    said = summary.summary_of(facts, title)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    for name, text in said.lines:
        grid.add_row(Text(name), _cell(text.split("\n"), 2000))
    parts: list[RenderableType] = [Text(clean(title), style="bold")] if title else []
    parts.append(grid)
    parts += [_table(each) for each in said.tables]
    if facts.functions or facts.values:
        parts.append(_table(_code(facts)))
    if not facts.rows and not facts.portable:
        parts.append(Text("no PythonOp"))
    elif calls:
        parts.append(_calls(facts))
    else:
        parts.append(Text("--calls shows each call", style="dim"))
    return Group(*parts)


def _table(said: summary.Table) -> Table:
    table = Table(*said.columns, show_lines=False, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for row in said.rows:
        table.add_row(*(Text(clean(text, 2000), style="red" if text.startswith("damaged: ") else "") for text in row))
    return table


def _code(facts: FileFacts) -> summary.Table:
    """With which code each Function was exported, enough of its fingerprints to see two apart; and the values that it reads beside its arguments."""
    rows = []
    for name in dict.fromkeys([*facts.functions, *facts.values]):
        code, module = facts.functions.get(name), name.partition(":")[0]
        halves = (
            [half.rpartition(":")[2][:12] or "not Python" for half in (code.forward, code.backward)] if code is not None else ["?", "?"]
        )
        reads = [f"{label.removeprefix(f'{module}:')} = {value!r}" for label, value in facts.values.get(name, {}).items()]
        rows.append((escaped(name), *halves, *([", ".join(reads)] if facts.values else [])))
    return summary.Table(("Code of", "Forward", "Backward", *(["Reads"] if facts.values else [])), rows)


def _calls(facts: FileFacts) -> RenderableType:
    """A row per call."""
    table = Table(show_lines=False, pad_edge=False)
    rows = (*facts.portable, *facts.rows)
    paired = ["Backward: gradients of"] if facts.gradients else []
    kinds = ["Is"] if facts.portable or any(row.opaque or row.kind == "PythonOpTangent" for row in rows) else []
    for column in ("#", "Function", *kinds, "Arguments", "Inputs", "Outputs", *paired, "Flags", "Where"):
        table.add_column(column, overflow="fold")
    for index, row in enumerate(rows):
        where = [text for text in (row.graph, row.module, row.source) if text]
        kind = clean(summary.kind_of(row), 400)
        arguments = Text(f"damaged: {clean(row.error, 400)}", style="red") if row.error is not None else _passed(row)
        table.add_row(
            str(index),
            Text(marked(row.function, 200)),
            *(Text(kind) for _ in kinds),
            arguments,
            _cell(row.inputs),
            _cell(row.outputs),
            *(_cell(row.backward) for _ in paired),
            _cell(row.flags),
            _cell(where, 200),
        )
    return Group(table, *([Text("* needs (has) a gradient", style="dim")] if facts.rows else []))


def _passed(row: CallFacts) -> Text:
    """The arguments of a call, cut where they get long; the names in them, which are not; and the settings of a module."""
    names = [f"names {escaped(name)}" for name in row.names if name != row.function]
    return Text("\n").join([_cell(part, limit) for part, limit in ((row.arguments, 120), (names, 1000), (row.settings, 400)) if part])


def _cell(texts: list[str], limit: int = 120) -> Text:
    return Text("\n".join(clean(text, limit) for text in texts))
