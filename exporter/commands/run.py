"""pythonop run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from exporter.commands.arrays import read_arrays
from exporter.commands.providers import check_providers, provider_option
from exporter.commands.run_file import Backend, feeds_of, run_feeds, sizes_hint
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
from exporter.files.proto import open_proto
from exporter.files.read import open_model
from exporter.files.save import writable
from exporter.files.tensors import data_files
from symbolics.text import clean

__all__ = ["allow_option", "dims_option", "inputs_option", "run", "sizes_of"]


# Options that other commands have that run a file.
allow_option = click.option(
    "--allow", multiple=True, metavar="PATTERN", help="Functions that the file may run: module:qualname or a glob over it. May be repeated."
)
inputs_option = click.option(
    "--inputs",
    type=click.Path(path_type=Path),
    help="An .npz file with an array per input. What it lacks is random, integers and flags are zeros.",
)
dims_option = click.option(
    "--dim",
    "dims",
    multiple=True,
    metavar="NAME=SIZE",
    help="The size of a symbolic dimension of random inputs. May be repeated. Default: 2.",
)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@allow_option
@inputs_option
@dims_option
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the outputs to this .npz file.")
@click.option("--reference", is_flag=True, help="Run on onnx.reference in place of onnxruntime.")
@provider_option
@click.option("--times", default=1, type=click.IntRange(min=1), help="How often to run. The time shown is the median.")
@setup_option
@strict_option
@json_option
@loudness
@click.pass_context
def run(
    context: click.Context,
    file: Path,
    allow: tuple[str, ...],
    inputs: Path | None,
    dims: tuple[str, ...],
    output: Path | None,
    reference: bool,
    providers: list[Any] | None,
    times: int,
    setups: tuple[str, ...],
    strict: bool,
    as_json: bool,
) -> None:
    """Run an ONNX FILE once. Functions that it names run only where --allow or --register says so."""
    if reference and providers:
        raise Failure("--reference runs on onnx.reference, which has no execution providers: leave --provider out")
    if output is not None:
        writable(output, Failure, keep=filter(None, (file, inputs)))
    with reported(context):
        model = open_model(file)  # a damaged file is our error, not the engine's
        if output is not None:
            writable(output, Failure, keep=data_files(model))
        run_setups(setups)
        arrays = read_arrays(inputs) if inputs is not None else {}
        engine: Backend = "reference" if reference else "onnxruntime"
        proto, sizes = open_proto(file)[0], sizes_of(dims)
        feeds = feeds_of(proto, arrays, sizes, 0)
        check_providers(providers)
        with status(f"running {file}", as_json), one_message(context, "the run", beside=sizes_hint(proto, arrays, sizes)):
            facts = run_feeds(
                file, proto, feeds, allow=allow, output=output, engine=engine, times=times, providers=providers, strict=strict
            )
        if as_json:
            click.echo(json.dumps(facts))
            return
        table = Table(
            "output",
            "type",
            "shape",
            "mean",
            "min",
            "max",
            title=f"{facts['engine']}, {facts['seconds'] * 1e3:.3g} ms",
            title_justify="left",
        )
        for fact in facts["outputs"]:
            numbers = [f"{fact[key]:.6g}" if key in fact else "" for key in ("mean", "min", "max")]
            table.add_row(*(Text(clean(str(text))) for text in (fact["name"], fact["dtype"], fact["shape"], *numbers)))
        show(table)


def sizes_of(dims: tuple[str, ...]) -> dict[str, int]:
    """What --dim says.

    Raises:
        Failure: It is no NAME=SIZE.
    """
    return dict(map(_dim, dims))


def _dim(text: str) -> tuple[str, int]:
    name, equals, size = text.rpartition("=")
    if not equals or not size.isdigit() or not int(size):
        raise Failure(f"--dim {text!r} is not of the form NAME=SIZE")
    return name, int(size)
