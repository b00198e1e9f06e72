"""pythonop export."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

import exporter
from exporter.commands.shared import eager_check_option, explained, load_target, reported, run_setups, setup_option, status, writable
from exporter.files.inspect import inspect_file
from exporter.files.program import save_model
from symbolics.node.dialects import DIALECTS
from symbolics.node.text import clean

__all__ = ["export"]


@click.command()
@click.argument("target")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The ONNX file to write.")
@click.option("--dynamo/--no-dynamo", default=True, help="Which of torch's exporters: torch.export (default) or TorchScript.")
@click.option("--inline", multiple=True, metavar="PATTERN", help="Functions to inline: module:qualname or a glob over it. May be repeated.")
@eager_check_option
@setup_option
@click.option("--opset", type=click.IntRange(min=1), help="The ONNX opset. Default: torch's.")
@click.option(
    "--schema", type=click.Choice(list(DIALECTS)), help="Write the PythonOp dialect of another reader; what it loses is a warning."
)
@click.option("--gradients", type=click.Path(path_type=Path), help="Also write the training graph (see pythonop gradient) to this file.")
@click.option("--external-data", is_flag=True, help="Keep the tensors in OUTPUT.data beside the file.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
@click.pass_context
def export(
    context: click.Context,
    target: str,
    output: Path,
    dynamo: bool,
    inline: tuple[str, ...],
    eager_check: bool,
    setups: tuple[str, ...],
    opset: int | None,
    schema: str | None,
    gradients: Path | None,
    external_data: bool,
    as_json: bool,
) -> None:
    """Export the model that TARGET makes; each call of an autograd Function stays one PythonOp."""
    for path in filter(None, (output, gradients)):
        writable(path)
    with reported(context):
        with status(f"importing {target}", as_json):
            run_setups(setups)
            case = load_target(target)
        with status(f"exporting {type(case.model).__name__}", as_json), explained(context):
            program = exporter.export(
                case.model,
                case.args,
                case.kwargs,
                dynamic_shapes=case.dynamic_shapes,
                dynamo=dynamo,
                opset_version=opset,
                inline=(*case.inline, *inline),
                eager_check=eager_check,
            )
        with status(f"writing {output}", as_json):
            program.save(output, schema=schema, external_data=external_data or None)
            report = inspect_file(output)
        if gradients is not None:
            with status(f"building the gradient graph of {output}", as_json):
                save_model(exporter.build_gradient_graph(program), gradients, external_data=external_data or None)
        counts = Counter(row.function for row in report.rows)
        facts = {
            "file": str(output),
            "bytes": output.stat().st_size,
            "schema": schema,
            "gradients": str(gradients) if gradients is not None else None,
            "calls": len(report.rows),
            "functions": dict(counts),
            "inlined": program.inlined,
            "stop_gradients": report.stop_gradients,
            "parameters": report.parameters,
            "trainable": report.trainable,
        }
        if as_json:
            click.echo(json.dumps(facts))
            return
        console = Console(highlight=False, soft_wrap=True)
        console.print(Text(f"wrote {clean(str(output))} ({facts['bytes']:,} bytes)"))
        console.print(
            Text(
                f"{len(report.rows)} PythonOp, {report.stop_gradients} stop-gradient marks, {report.trainable} of {report.parameters} parameters trainable"
            )
        )
        if gradients is not None:
            console.print(Text(f"wrote {clean(str(gradients))} ({gradients.stat().st_size:,} bytes), its training graph"))
        for name, count in counts.most_common():
            console.print(Text(f"  {count} x {clean(name)}"))
