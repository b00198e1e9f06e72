"""pythonop profile."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from exporter.commands.arrays import read_arrays
from exporter.commands.providers import check_providers, provider_option
from exporter.commands.run import allow_option, dims_option, inputs_option, sizes_of
from exporter.commands.run_file import feeds_of, sizes_hint
from exporter.commands.shared import (
    Failure,
    json_option,
    loudness,
    one_message,
    reported,
    run_setups,
    setup_option,
    show,
    status,
    strict_option,
)
from exporter.files.data_facts import data_beside
from exporter.files.proto import open_proto
from exporter.files.save import saving, writable
from exporter.profiling.profile import Profile, profile as profile_file
from symbolics.errors import PythonopError
from symbolics.text import clean, extra

__all__ = ["profile", "render"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@allow_option
@inputs_option
@dims_option
@click.option(
    "--times",
    default=10,
    show_default=True,
    type=click.IntRange(min=1),
    help="How many runs. Times are their medians; a run before them is not timed.",
)
@provider_option
@click.option("--as-written", is_flag=True, help="Run each node as the file has it. Default: as onnxruntime fuses them.")
@click.option("--top", default=15, show_default=True, type=click.IntRange(min=1), help="How many rows of each table.")
@click.option("--html", type=click.Path(path_type=Path), help="Also write a flame view as one self-contained page.")
@setup_option
@strict_option
@json_option
@loudness
@click.pass_context
def profile(
    context: click.Context,
    file: Path,
    allow: tuple[str, ...],
    inputs: Path | None,
    dims: tuple[str, ...],
    times: int,
    providers: list[Any] | None,
    as_written: bool,
    top: int,
    html: Path | None,
    setups: tuple[str, ...],
    strict: bool,
    as_json: bool,
) -> None:
    """Say where the time of an ONNX FILE goes: by operator, by module, by node, PythonOps apart.

    It is run by onnxruntime; Functions that it names run only where --allow or --register says so.
    """
    if html is not None:
        writable(html, Failure, keep=filter(None, (file, inputs, *data_beside(file))))
    with reported(context):
        proto, _ = open_proto(file)
        run_setups(setups)
        arrays, sizes = read_arrays(inputs) if inputs is not None else {}, sizes_of(dims)
        feeds = feeds_of(proto, arrays, sizes, 0)
        check_providers(providers)
        with status(f"profiling {file}", as_json), one_message(context, "the run", beside=sizes_hint(proto, arrays, sizes)):
            found = profile_file(file, feeds, allow=allow, runs=times, providers=providers, as_written=as_written, strict=strict)
        if html is not None:
            from exporter.profiling.flame import flame_page

            try:
                page = flame_page(found, file.name)
            except ImportError as error:
                raise Failure(f"--html needs jinja2 ({error}): {extra('report')}") from error
            with saving(PythonopError) as files:
                files.open(html).write(page.encode())
        if as_json:
            click.echo(json.dumps(found.as_json()))
            return
        show(render(found, str(file), top))
        if html is not None:
            show(Text(f"wrote {clean(str(html))}"))


def render(found: Profile, title: str, top: int = 15) -> RenderableType:
    """The times for a terminal. Texts of the file are rich Texts: markup in them is not read."""
    total = sum(row.seconds for row in found.rows)
    facts = ", ".join(f"{what} {text}" for what, text in found.facts.items())
    lines = [
        f"one run {_ms(found.seconds)} (median of {found.runs}), {_ms(total)} of it in nodes; loaded in {_ms(found.load)}",
        f"PythonOps {_ms(found.python)}, {_share(found.python, total)}",
        *_on_providers(found, total),
        *(f"{part} {_ms(seconds)}, {_share(seconds, total)}" for part, (seconds, _) in found.by_part().items()),
        facts,
    ]
    operators = [((name,), numbers) for name, numbers in found.by_operator().items()]
    modules = [
        ((part, path or "(the model itself)" if part != "onnxruntime's own" else ""), numbers)
        for (part, path), numbers in found.by_module().items()
    ]
    nodes = [((row.name, f"{row.operator} {row.function}".strip(), row.module), row.seconds, row.calls) for row in found.rows]
    tables = (
        _table(("Operator",), ((texts, s, n) for texts, (s, n) in operators), len(operators), top, total),
        _table(("Part", "Module"), ((texts, s, n) for texts, (s, n) in modules), len(modules), top, total),
        _table(("Node", "Operator", "Module"), nodes, len(nodes), top, total),
    )
    return Group(Text(clean(title), style="bold"), *(Text(clean(line, 400)) for line in lines), *tables)


def _on_providers(found: Profile, total: float) -> Iterator[str]:
    """Where more than one execution provider ran nodes: what each did, and the copies between them."""
    by_provider = found.by_provider()
    if set(by_provider) <= {"CPUExecutionProvider", ""}:
        return
    yield "; ".join(
        f"{name or 'nobody'}: {calls} nodes, {_ms(seconds)}, {_share(seconds, total)}" for name, (seconds, calls) in by_provider.items()
    )
    seconds, count = found.copies
    yield f"copies between their memories: {count}, {_ms(seconds)}"


def _table(columns: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], float, int]], count: int, top: int, total: float) -> Table:
    table = Table(pad_edge=False, caption=f"and {count - top} more: --top" if count > top else None, caption_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for column in ("Time", "Share", "Calls"):
        table.add_column(column, justify="right")
    for texts, seconds, calls in list(rows)[:top]:
        table.add_row(*(Text(clean(text)) for text in texts), _ms(seconds), _share(seconds, total), str(calls))
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def _share(seconds: float, total: float) -> str:
    return f"{seconds / total:.1%}" if total else "0%"
