"""pythonop verify."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from exporter.commands import shared
from exporter.commands.inputs import input_options, load_case
from exporter.commands.providers import provider_option
from exporter.commands.verify_quantized import quantized_options, verify_quantized
from exporter.files.data_facts import data_beside
from exporter.files.save import writable
from symbolics.text import clean

__all__ = ["verify"]


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="[FILE] TARGET")
@shared.dynamo_option
@input_options
@shared.inline_option
@shared.portable_options
@shared.opaque_option
@shared.functions_option
@shared.fallback_option
@click.option("--html", type=click.Path(path_type=Path), help="Also write the report as one self-contained page.")
@shared.json_option
@click.option("--bisect", is_flag=True, help="Where something differs, find the first node that departs.")
@click.option(
    "--setup", metavar="PKG.MOD:FUNCTION", help="Called first in the fresh process; it calls exporter.register(). Default: TARGET."
)
@shared.opset_option
@provider_option
@click.option(
    "--allow",
    multiple=True,
    metavar="PATTERN",
    help="Functions that FILE may run: module:qualname or a glob over it. May be repeated. Default: those of an export of the model.",
)
@click.option("--timeout", default=600.0, show_default=True, help="Seconds that the fresh process may take.")
@quantized_options
@shared.setup_option
@shared.loudness
@click.pass_context
def verify(
    context: click.Context,
    targets: tuple[str, ...],
    dynamo: bool,
    inputs: tuple[str, ...],
    dynamic: tuple[str, ...],
    inline: tuple[str, ...],
    portable: bool,
    portable_only: tuple[str, ...],
    opaque: tuple[str, ...],
    functions: tuple[str, ...],
    fallback: bool,
    html: Path | None,
    as_json: bool,
    bisect: bool,
    setup: str | None,
    opset: int | None,
    providers: list[Any] | None,
    allow: tuple[str, ...],
    timeout: float,
    setups: tuple[str, ...],
    quantized: Path | None,
    runs: int,
    arrays: Path | None,
    dims: tuple[str, ...],
    max_floats: int | None,
    max_levels: float,
    max_classes: float,
    max_outputs: float,
) -> None:
    """Compare the file of the model that TARGET makes, and its gradients, with eager PyTorch; with FILE, that ONNX file as it is.

    With --quantized INTEGERS, that file in integers with its fake-quantised model: thresholds by bisection, levels and classes on inputs, on onnxruntime's CPU.

    The file is run by onnxruntime in a fresh process. The exit status is 0 where all tensors are equal within what their
    type can do, 1 where one differs, 2 where the comparison could not be made.
    """
    from exporter.verification.notes import ALWAYS
    from exporter.verification.verify import verify as run

    *files, target = targets
    if quantized is not None:
        if files:
            raise click.UsageError("--quantized takes one model beside it: a TARGET, or an ONNX file")
        verify_quantized(
            context, quantized, target, runs=runs, arrays=arrays, dims=dims,
            limits={"floats": max_floats, "levels": max_levels, "classes": max_classes, "outputs": max_outputs},
            inputs=inputs, dynamic=dynamic, dynamo=dynamo, opset=opset, setups=setups, as_json=as_json,
        )  # fmt: skip
        return
    if any(
        context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE
        for name in ("runs", "arrays", "dims", "max_floats", "max_levels", "max_classes", "max_outputs")
    ):
        raise click.UsageError("--runs, --inputs, --dim, --max-floats, --max-levels, --max-classes and --max-outputs are for --quantized")
    if len(files) > 1 or (files and ":" in files[0] and not Path(files[0]).exists()):  # a TARGET, and more
        raise click.UsageError(
            f"Got unexpected extra argument ({clean(targets[-1])}): verify takes one TARGET, and at most one FILE before it"
        )
    if files and not Path(files[0]).is_file():
        raise shared.Failure(f"{clean(files[0])}: there is no such file")
    if allow and not files:
        raise shared.Failure("--allow is for a FILE: what is exported here may run what it names")
    if html is not None:
        writable(html, shared.Failure, keep=(kept for each in map(Path, files) for kept in (each, *data_beside(each))))
    with shared.reported(context):
        with shared.status(f"importing {target}", as_json):
            shared.run_setups(setups)
            case = load_case(target, inputs, dynamic)
            case = replace(
                case,
                inline=(*case.inline, *inline),
                portable=shared.portable_of(case, portable, portable_only),
                opaque=shared.opaque_of(case, opaque),
                functions=shared.functions_of(case, functions),
                fallback=fallback or case.fallback,
            )
        with shared.status(f"verifying {type(case.model).__name__}", as_json), contextlib.redirect_stdout(sys.stderr):
            with shared.one_message(context, "the comparison"):
                report = run(
                    case, dynamo=dynamo, setup=setup or target, opset_version=opset, bisect=bisect, timeout=timeout,
                    file=files[0] if files else None, allow=allow or None, providers=providers,
                )  # fmt: skip
        report.facts["model"] = f"{type(case.model).__name__} ({' '.join(targets)})"
        if html is not None:
            report.to_html(html)
        if as_json:
            click.echo(json.dumps(report.as_json()))
        else:
            shared.show(report.render())
            if shared.loud() < 0:  # equal numbers do not answer these
                for note in report.notes:
                    if note.title in ALWAYS:
                        click.echo(clean(f"{note.title}: {note.text}", 2000), err=True)
            if html is not None:
                shared.show(Text(f"wrote {clean(str(html))}"))
        if not report.ok:
            context.exit(1)
