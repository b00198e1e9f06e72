"""pythonop verify --quantized: a file in integers against its fake-quantised model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import exporter
from exporter.commands import shared
from exporter.commands.compared import compared_feeds
from exporter.commands.inputs import load_case
from exporter.commands.run import dims_option
from exporter.files.read import open_model
from symbolics.text import clean

__all__ = ["quantized_options", "verify_quantized"]

_UNSAID = ("html", "bisect", "setup", "providers", "allow", "fallback", "opaque", "functions", "portable_only")


def quantized_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--quantized and what belongs to it."""
    share = click.FloatRange(0, 1)
    for option in (
        click.option(
            "--max-outputs",
            type=click.FloatRange(min=0),
            default=0.001,
            show_default=True,
            help="With --quantized: by how much of its size (rms) an output may differ where all levels are the same.",
        ),
        click.option(
            "--max-classes",
            type=share,
            default=0.005,
            show_default=True,
            help="With --quantized: the share of rows whose class may change.",
        ),
        click.option(
            "--max-levels",
            type=share,
            default=0.05,
            show_default=True,
            help="With --quantized: the share of a quantiser's levels that may differ.",
        ),
        click.option(
            "--max-floats",
            type=click.IntRange(min=0),
            help="With --quantized: by how many float32 numbers a threshold may be away. Default: 2, or a 32,768th of a step.",
        ),
        dims_option,
        click.option(
            "--inputs",
            "arrays",
            type=click.Path(path_type=Path),
            help="With --quantized: an .npz file with an array per input. What it lacks is random, integers and flags are zeros.",
        ),
        click.option(
            "--runs",
            default=10,
            show_default=True,
            type=click.IntRange(min=1),
            help="With --quantized: how many inputs; one where --inputs gives all.",
        ),
        click.option(
            "--quantized",
            type=click.Path(path_type=Path),
            metavar="INTEGERS",
            help="Compare this file in integers with its fake-quantised model: TARGET, or an ONNX file in its place.",
        ),
    ):
        command = option(command)
    return command


def verify_quantized(
    context: click.Context,
    integers: Path,
    model: str,
    *,
    runs: int,
    arrays: Path | None,
    dims: tuple[str, ...],
    limits: dict[str, Any],
    inputs: tuple[str, ...],
    dynamic: tuple[str, ...],
    dynamo: bool,
    opset: int | None,
    setups: tuple[str, ...],
    as_json: bool,
) -> None:
    """What `pythonop verify --quantized` does; the exit status is 1 where something is beyond the limits.

    Args:
        context: The command.
        integers: The file in integers.
        model: The fake-quantised model: an ONNX file, or a TARGET, which is exported.
        runs, arrays, dims: How many inputs, which are given, and sizes of the others.
        limits: As `exporter.verify_quantized` takes them.
        inputs, dynamic, dynamo, opset, setups: How TARGET is exported.
        as_json: Whether the result is for a program.

    Raises:
        Failure: A file is not there, or no model.
    """
    for name in _UNSAID:
        if context.params.get(name):
            raise shared.Failure(f"--{name.replace('_', '-')} is not for --quantized, which runs two files")
    with shared.reported(context):
        whole = open_model(integers)
        rounded: Any = Path(model)
        if rounded.is_file():
            rounded = open_model(rounded)
        else:
            with shared.status(f"importing {model}", as_json):
                shared.run_setups(setups)
                case = load_case(model, inputs, dynamic)
            with shared.status(f"exporting {type(case.model).__name__}", as_json), shared.one_message(context, "the export"):
                rounded = exporter.export(
                    case.model,
                    case.args,
                    case.kwargs,
                    dynamo=dynamo,
                    dynamic_shapes=case.dynamic_shapes,
                    opset_version=opset,
                    portable=True,
                )
        call = "exporter.verify_quantized(integers, model, *data)"
        feeds, notes, hint = compared_feeds(context, exporter.Program(whole).model_proto, runs, arrays, dims, in_python=call)
        with shared.status("comparing", as_json), shared.one_message(context, "the comparison", beside=hint):
            proof = exporter.verify_quantized(whole, rounded, *feeds, **limits)
        shared.tell(proof.as_json(), (f"{clean(str(integers))} beside {clean(model)}", *str(proof).splitlines(), *notes), as_json)
        if not proof.ok:
            context.exit(1)
