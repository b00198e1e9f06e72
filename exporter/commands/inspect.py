"""pythonop inspect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from exporter.commands.shared import reported
from exporter.files.inspect import FileFacts, inspect_file
from symbolics.text import clean

__all__ = ["inspect", "render"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
@click.pass_context
def inspect(context: click.Context, file: Path, as_json: bool) -> None:
    """Show the calls of autograd Functions in an ONNX FILE. Nothing of the file is run or imported, and torch is not needed."""
    with reported(context):
        facts = inspect_file(file)
        if as_json:
            click.echo(json.dumps(facts.as_json()))
        else:
            Console(highlight=False).print(render(facts, str(file)))
        damaged = sum(row.error is not None for row in facts.rows)
        links = sum(link.error is not None for link in facts.links)
        if damaged or links:
            if damaged and not as_json:
                click.echo(f"{damaged} of {len(facts.rows)} PythonOps cannot be read", err=True)
            if links and not as_json:
                click.echo(f"{links} of {len(facts.links)} links of functions to their backward cannot be read", err=True)
            context.exit(1)


def render(facts: FileFacts, title: str = "") -> RenderableType:
    """What a file says, for a terminal. Texts of the file are rich Texts: markup in them is not read."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    for name, text in _lines_of(facts):
        grid.add_row(Text(name), Text(clean(text, 2000)))
    parts: list[RenderableType] = [Text(clean(title), style="bold")] if title else []
    parts.append(grid)
    if facts.links:
        parts.append(_links(facts))
    if rows := (*facts.portable, *facts.rows):
        table = Table(show_lines=False, pad_edge=False)
        paired = ["Backward: gradients of"] if facts.gradients else []
        kinds = ["Is"] if facts.portable or any(row.opaque or row.kind == "PythonOpTangent" for row in rows) else []
        for column in ("#", "Function", *kinds, "Arguments", "Inputs", "Outputs", *paired, "Flags", "Where"):
            table.add_column(column, overflow="fold")
        for index, row in enumerate(rows):
            where = [clean(text) for text in (row.graph, row.module, row.source) if text]
            kind = "an ONNX function" if row.kind == "function" else f"a {row.kind}"
            kind += f": {clean(row.opaque, 400)}" if row.opaque else ""
            arguments = Text(f"damaged: {clean(row.error, 400)}", style="red") if row.error is not None else _cell(row.arguments)
            table.add_row(
                str(index),
                Text(clean(row.function)),
                *(Text(kind) for _ in kinds),
                arguments,
                _cell(row.inputs),
                _cell(row.outputs),
                *(_cell(row.backward) for _ in paired),
                _cell(row.flags),
                _cell(where),
            )
        parts.append(table)
        if facts.rows:
            parts.append(Text("* needs (has) a gradient", style="dim"))
    else:
        parts.append(Text("no PythonOp"))
    return Group(*parts)


def _links(facts: FileFacts) -> Table:
    """The ONNX functions that have a backward of their own."""
    table = Table(show_lines=False, pad_edge=False)
    for column in ("ONNX function", "Backward", "Differentiable"):
        table.add_column(column, overflow="fold")
    for link in facts.links:
        if link.error is not None:
            table.add_row(Text(clean(link.name)), Text(f"damaged: {clean(link.error, 400)}", style="red"), Text(""))
            continue
        times = "no" if not link.backward else "once" if link.once else "again and again"
        table.add_row(Text(clean(link.name)), Text(clean(link.backward)), Text(times))
    return table


def _cell(texts: list[str]) -> Text:
    return Text("\n".join(clean(text, 120) for text in texts))


def _lines_of(facts: FileFacts) -> Iterator[tuple[str, str]]:
    version = facts.format_version
    yield "format", f"pythonop {version}" if version is not None else "not written by pythonop"
    yield "ONNX", f"IR {facts.ir_version}, " + ", ".join(f"{domain or 'ai.onnx'} {number}" for domain, number in facts.opsets.items())
    portable = f"{len(facts.portable)} ONNX functions with a backward of their own, " if facts.portable else ""
    tangents = sum(row.kind == "PythonOpTangent" for row in facts.rows)
    counts = [
        f"{len(facts.rows) - tangents} PythonOp",
        f"{facts.gradients} PythonOpGrad",
        *([f"{tangents} PythonOpTangent"] if tangents else []),
    ]
    pairs = [f"{what} paired" for what, there in (("gradients", facts.training), ("tangents", facts.tangents)) if there]
    yield "calls", portable + ", ".join((*counts, *pairs))
    if facts.unchecked:
        yield "not checked", f"against the Functions of an eager run: {facts.unchecked}"
    recorded = facts.stop_gradients_recorded
    lost = (
        ""
        if recorded in (None, facts.stop_gradients)
        else f" (the metadata says {recorded}: an optimizer removed some, gradients of this file would be wrong)"
    )
    yield "stop-gradient marks", f"{facts.stop_gradients}{lost}"
    if (step := facts.step) is not None:
        yield (
            "training step",
            f"{step.optimizer}: takes {', '.join((*step.inputs, *step.targets))}; trains {len(step.parameters)} parameters, updates {len(step.buffers)} buffers",
        )
        if step.untrained:
            yield "untrained", ", ".join(step.untrained)
    if version is not None:
        yield "parameters", f"{facts.parameters}, {facts.trainable} trainable, {facts.frozen} frozen"
        yield "buffers", f"{facts.buffers}, {facts.not_persistent} not in state_dict()"
    for group in facts.tied:
        yield "tied", " = ".join(group)
