"""pythonop doctor."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import click
from rich.table import Table
from rich.text import Text

from exporter.commands.providers import placement_option
from exporter.commands.run import allow_option, dims_option, inputs_option
from exporter.commands.shared import Failure, json_option, loudness, setup_option, show, status
from exporter.pictures.layout import missing
from symbolics.errors import PythonopError
from symbolics.text import cause, clean

__all__ = ["doctor"]

_PACKAGES = ("torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "numpy", "Jinja2")


@dataclass
class _Finding:
    """What was looked at, how it is, and what to do where it is not well. ``not there``: something optional."""

    what: str
    word: Literal["works", "not there", "fails"]
    text: str


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--run", "runs", is_flag=True, help="Also run FILE on onnxruntime, and say which share of the time its calls of Python take.")
@allow_option
@inputs_option
@dims_option
@placement_option
@setup_option
@json_option
@loudness
@click.pass_context
def doctor(
    context: click.Context,
    file: Path | None,
    runs: bool,
    allow: tuple[str, ...],
    inputs: Path | None,
    dims: tuple[str, ...],
    providers: list[Any] | None,
    setups: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say which versions are installed, and try here what a file goes through: export, gradient, runtimes. Exit code 1: something fails.

    With a FILE: say which of its nodes need Python, for what reason, what has to be allowed, and whether other runtimes run it. Nothing of it is
    imported or run, but with --run, which runs the Functions that --allow or --register names. With --provider: which nodes that provider takes.
    """
    if file is not None:
        from exporter.commands.doctor_file import doctor_file

        return doctor_file(context, file, runs, allow, inputs, dims, providers, setups, as_json)
    if runs or allow or inputs is not None or dims or providers or setups:
        raise Failure("--run, --allow, --inputs, --dim, --provider and --register are about a FILE: name one")
    versions = {"python": platform.python_version(), "platform": platform.platform(terse=True), **dict(_versions())}
    findings: list[_Finding] = []
    with status("importing torch", as_json):
        from exporter.verification.trials import TRIALS, anew
    anew()
    for what, trial in (TRIALS | {"pictures": _pictures}).items():
        with status(what, as_json):
            findings.append(_found(what, trial))
    if as_json:
        click.echo(json.dumps({"versions": versions, "findings": [asdict(each) for each in findings]}))
    else:
        _show(versions, findings)
    if any(each.word == "fails" for each in findings):
        context.exit(1)


def _versions() -> Iterator[tuple[str, str]]:
    for name in ("pythonop", *_PACKAGES):
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"


def _pictures() -> str:
    from exporter.verification.trials import NotThere

    if (problem := missing()) is not None:
        raise NotThere(problem)
    return "pythonop draw lays them out"


def _found(what: str, trial: Callable[[], Any]) -> _Finding:
    from exporter.verification.trials import NotThere

    try:
        return _Finding(what, "works", str(trial() or ""))
    except NotThere as absent:
        return _Finding(what, "not there", str(absent))
    except Exception as error:  # whatever this machine's packages raise is the answer
        return _Finding(what, "fails", str(error) if isinstance(error, PythonopError) else cause(error))


def _show(versions: dict[str, str], findings: list[_Finding]) -> None:
    grid = Table.grid(padding=(0, 2))
    for name, version in versions.items():
        grid.add_row(Text(name, style="dim"), Text(version))
    show(grid)
    table = Table(pad_edge=False)
    for column in ("What", "Here", ""):
        table.add_column(column, overflow="fold")
    style = {"works": "green", "not there": "yellow", "fails": "bold red"}
    for each in findings:
        table.add_row(Text(each.what), Text(each.word, style=style[each.word]), Text(clean(each.text, 800)))
    show(table)
