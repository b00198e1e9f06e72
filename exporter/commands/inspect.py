"""pythonop inspect."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from exporter.commands.shared import reported
from exporter.files.inspect import inspect_file, render

__all__ = ["inspect"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
@click.pass_context
def inspect(context: click.Context, file: Path, as_json: bool) -> None:
    """Show the PythonOps of an ONNX FILE. Nothing of the file is run or imported, and torch is not needed."""
    with reported(context):
        report = inspect_file(file)
        if as_json:
            click.echo(json.dumps(report.as_json()))
        else:
            Console(highlight=False).print(render(report, str(file)))
        damaged = sum(row.error is not None for row in report.rows)
        if damaged:
            if as_json is False:
                click.echo(f"{damaged} of {len(report.rows)} PythonOps cannot be read", err=True)
            context.exit(1)
