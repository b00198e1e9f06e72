"""pythonop export."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

import exporter
from exporter.commands import shared
from exporter.commands.inputs import input_options, load_case
from exporter.commands.written import Written
from exporter.files.inspect import inspect_file
from exporter.files.program import save_models
from exporter.files.save import writable
from symbolics.node.dialects import DIALECTS, to_dialect
from symbolics.text import clean

__all__ = ["export"]


@click.command()
@click.argument("target")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The ONNX file to write.")
@shared.dynamo_option
@input_options
@shared.output_name_option
@shared.inline_option
@shared.portable_options
@shared.opaque_option
@shared.functions_option
@shared.fallback_option
@shared.eager_check_option
@shared.setup_option
@shared.opset_option
@click.option(
    "--schema", type=click.Choice(list(DIALECTS)), help="Write the PythonOp dialect of another reader; what it loses is a warning."
)
@click.option("--gradients", type=click.Path(path_type=Path), help="Also write the training graph (see pythonop gradient) to this file.")
@shared.external_data_option
@shared.check_option
@shared.json_option
@shared.loudness
@click.pass_context
def export(
    context: click.Context,
    target: str,
    output: Path,
    dynamo: bool,
    inputs: tuple[str, ...],
    dynamic: tuple[str, ...],
    output_names: tuple[str, ...],
    inline: tuple[str, ...],
    portable: bool,
    portable_only: tuple[str, ...],
    opaque: tuple[str, ...],
    functions: tuple[str, ...],
    fallback: bool,
    eager_check: bool,
    setups: tuple[str, ...],
    opset: int | None,
    schema: str | None,
    gradients: Path | None,
    external_data: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Export the model that TARGET makes; each call of an autograd Function stays one PythonOp."""
    writable(output, shared.Failure)
    if gradients is not None:
        writable(gradients, shared.Failure, keep=[output])
    with shared.reported(context):
        with shared.status(f"importing {target}", as_json):
            shared.run_setups(setups)
            case = load_case(target, inputs, dynamic)
            wanted = shared.portable_of(case, portable, portable_only)
        with shared.status(f"exporting {type(case.model).__name__}", as_json), shared.explained(context):
            program = exporter.export(
                case.model,
                case.args,
                case.kwargs,
                dynamic_shapes=case.dynamic_shapes,
                dynamo=dynamo,
                opset_version=opset,
                inline=(*case.inline, *inline),
                portable=wanted,
                opaque=shared.opaque_of(case, opaque),
                functions=shared.functions_of(case, functions),
                fallback=fallback or case.fallback,
                eager_check=eager_check,
                verbose=shared.loud() > 0,
                output_names=list(output_names) or None,
            )
        models = [(program.model, output)]
        if gradients is not None:
            with shared.status(f"building the gradient graph of {output}", as_json):
                models.append((exporter.build_gradient_graph(program), gradients))
        unchecked = shared.checked(models, check, as_json)
        with shared.status(f"writing {output}", as_json):
            written = program.model if schema is None else to_dialect(program.model, schema)
            save_models([(written, output), *models[1:]], external_data=external_data or None, check=False)
            report = inspect_file(output)
        of_model = Written.of(output)
        counts = Counter(row.function for row in report.rows)
        facts = {
            **of_model.facts,
            "schema": schema,
            "gradients": str(gradients) if gradients is not None else None,
            "calls": len(report.rows),
            "functions": dict(counts),
            "inlined": program.inlined,
            "fallback": program.fallback,
            "portable": shared.portable_facts(program),
            "stop_gradients": report.stop_gradients,
            "unchecked": unchecked,
            "parameters": report.parameters,
            "trainable": report.trainable,
        }
        lines = [
            of_model.said(),
            f"{len(report.rows)} PythonOp, {report.stop_gradients} stop-gradient marks, {report.trainable} of {report.parameters} parameters trainable",
        ]
        if gradients is not None:
            lines.append(f"{Written.of(gradients).said()}, its training graph")
        lines += [*unchecked, *shared.portable_lines(program)]
        shared.tell(facts, (*lines, *(f"  {count} x {clean(name)}" for name, count in counts.most_common())), as_json)
