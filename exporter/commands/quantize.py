"""pythonop quantize."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import exporter
from exporter.commands.compared import compared_feeds
from exporter.commands.run import dims_option, inputs_option
from exporter.commands.shared import (
    Failure,
    check_option,
    checked,
    external_data_option,
    json_option,
    loudness,
    one_message,
    reported,
    status,
    tell,
)
from exporter.commands.written import Written
from exporter.files.examine import size_of
from exporter.files.program import save_model
from exporter.files.read import open_model
from exporter.files.save import writable
from exporter.files.tensors import data_files

__all__ = ["quantize"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The file in integers to write.")
@click.option(
    "--to",
    "form",
    type=click.Choice(["integers", "qonnx", "floats"]),
    default="integers",
    show_default=True,
    help="What to write: integers; QONNX's Quant nodes, for hardware; a QONNX file in standard operators, in rounded floats.",
)
@click.option("--weights", type=click.Choice(["int4"]), help="Give matrix products that would stay in float weights of 4 bits.")
@click.option(
    "--group", type=int, metavar="N", help="With --weights: how many numbers share a step: 16 to 256. Default: what is exact, or 32."
)
@click.option(
    "--compare",
    "runs",
    default=0,
    type=click.IntRange(min=0),
    metavar="N",
    help="Run both models on N inputs, and say which levels differ. Where --inputs gives all inputs, N is 1.",
)
@inputs_option
@dims_option
@external_data_option
@check_option
@json_option
@loudness
@click.pass_context
def quantize(
    context: click.Context,
    file: Path,
    output: Path,
    form: str,
    weights: Any,
    group: int | None,
    runs: int,
    inputs: Path | None,
    dims: tuple[str, ...],
    external_data: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Write a fake-quantised ONNX FILE in integers, in the forms that onnxruntime's CPU runs in integer kernels.

    Say of each convolution and matrix product which kernel runs it, or why it stays in float. Quantisers are found by what they compute; those in
    Functions of one's own are seen where the file was exported with --portable. FILE may have QONNX's quantisers.
    """
    writable(output, Failure, keep=filter(None, (file, inputs)))
    if form != "integers" and (runs or weights or group):
        raise click.UsageError(f"--compare, --weights and --group are for --to integers, not {form}")
    with reported(context):
        with status(f"looking for quantisers in {file}", as_json):
            model = open_model(file)
            before = file.stat().st_size + sum(size_of(data) or 0 for data in data_files(model))
            writable(output, Failure, keep=data_files(model))
            if form != "integers":
                program = exporter.to_qonnx(model) if form == "qonnx" else exporter.from_qonnx(model)
                facts, lines = _other_form(program)
                checks = checked([(program.model, output)], check, as_json) if form == "floats" else []
                save_model(program.model, output, external_data=external_data or None, check=check)
                tell({"file": str(output), **facts, "unchecked": checks}, [Written.of(output).said(), *lines, *checks], as_json)
                return
            quantized = exporter.quantize(model, weights=weights, group=group)
        compared, notes = None, list[str]()
        if runs:
            call = "exporter.quantize(model).compare(*data)"
            feeds, notes, hint = compared_feeds(context, quantized.model_proto, runs, inputs, dims, in_python=call)
            with status("comparing", as_json), one_message(context, "the run", beside=hint):
                compared = quantized.compare(*feeds)
        unchecked = checked([(quantized.model, output)], check, as_json)
        with status(f"writing {output}", as_json):
            save_model(quantized.model, output, external_data=external_data or None, check=False)
        of_model = Written.of(output)
        facts = {
            **of_model.facts,
            "bytes_before": before,
            "products": [asdict(each) for each in quantized.products],
            "activations": [asdict(each) for each in quantized.activations],
            "left": quantized.left,
            "compared": compared and asdict(compared),
            "unchecked": unchecked,
        }
        lines = [of_model.said(f"; before {before:,}"), *str(quantized).splitlines()]
        tell(facts, (*lines, *(str(compared).splitlines() if compared else ()), *notes, *unchecked), as_json)


def _other_form(program: exporter.Program) -> tuple[dict[str, Any], list[str]]:
    """What became of a model that is not in integers: facts, and lines."""
    if not isinstance(program, exporter.Qonnx):
        return {}, ["in standard operators, in rounded floats"]
    return {"quantizers": [asdict(each) for each in program.quantizers], "left": program.left}, str(program).splitlines()
