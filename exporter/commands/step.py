"""pythonop step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

import exporter
from exporter.commands.shared import eager_check_option, explained, load_target, reported, run_setups, setup_option, status, writable
from symbolics.node.text import clean
from symbolics.optimizers import OPTIMIZERS

__all__ = ["step"]


def _hyperparameters(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            out[name] = json.loads(f"[{value}]" if "," in value else value)
        except ValueError as error:
            raise click.BadParameter(f"{text!r} is not NAME=NUMBER (betas=0.9,0.95; nesterov=true)") from error
        if not equals:
            raise click.BadParameter(f"{text!r} is not NAME=NUMBER")
    return out


@click.command()
@click.argument("target")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The training step to write; OUTPUT's stem.init.onnx beside it gives the initial state.",
)
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", show_default=True)
@click.option(
    "--set",
    "hyperparameters",
    multiple=True,
    metavar="NAME=NUMBER",
    callback=_hyperparameters,
    help="A hyperparameter: lr=0.01, betas=0.9,0.95, nesterov=true. May be repeated.",
)
@click.option("--clip-norm", type=float, help="Clip the gradients to this norm of all together.")
@click.option("--accumulate", type=click.IntRange(min=1), default=1, show_default=True, help="Update every so many runs.")
@click.option("--precision", type=click.Choice(["float16", "bfloat16"]), help="Compute in this type; parameters keep theirs.")
@click.option("--dynamo/--no-dynamo", default=True, help="Which of torch's exporters: torch.export (default) or TorchScript.")
@click.option("--inline", multiple=True, metavar="PATTERN", help="Functions to inline: module:qualname or a glob over it. May be repeated.")
@eager_check_option
@setup_option
@click.option("--opset", type=click.IntRange(min=1), help="The ONNX opset. Default: torch's.")
@click.option("--external-data", is_flag=True, help="Keep the tensors in a file beside each model.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
@click.pass_context
def step(
    context: click.Context,
    target: str,
    output: Path,
    optimizer: str,
    hyperparameters: dict[str, Any],
    clip_norm: float | None,
    accumulate: int,
    precision: str | None,
    dynamo: bool,
    inline: tuple[str, ...],
    eager_check: bool,
    setups: tuple[str, ...],
    opset: int | None,
    external_data: bool,
    as_json: bool,
) -> None:
    """Write forward, loss, gradients and optimizer as one ONNX model. TARGET's Case names the loss and example targets."""
    writable(output)
    with reported(context):
        with status(f"importing {target}", as_json):
            run_setups(setups)
            case = load_target(target)
        with status(f"exporting a training step of {type(case.model).__name__}", as_json), explained(context):
            program = exporter.export_training_step(
                case.model, case.args, case.kwargs, loss=case.loss, targets=case.targets, dynamic_shapes=case.dynamic_shapes, optimizer=optimizer, hyperparameters=hyperparameters, clip_norm=clip_norm, accumulate=accumulate,
                precision=precision, dynamo=dynamo, opset_version=opset, inline=(*case.inline, *inline), eager_check=eager_check,
            )  # fmt: skip
        with status(f"writing {output}", as_json):
            program.save(output, external_data=external_data or None)
        layout = program.layout
        assert layout is not None
        initial = output.with_name(f"{output.stem}.init.onnx")
        nodes = len(list(program.model.graph.all_nodes()))
        if as_json:
            facts = {
                "file": str(output),
                "initial": str(initial),
                "bytes": output.stat().st_size,
                "nodes": nodes,
                "inlined": program.inlined,
            }
            click.echo(
                json.dumps(
                    {**facts, "inputs": layout.inputs, "targets": layout.targets, "carried": layout.carried, "untrained": layout.untrained}
                )
            )
            return
        console = Console(highlight=False, soft_wrap=True)
        console.print(Text(f"wrote {clean(str(output))} ({output.stat().st_size:,} bytes, {nodes} nodes)"))
        console.print(Text(f"wrote {clean(str(initial))} ({initial.stat().st_size:,} bytes), which gives the initial state"))
        console.print(
            Text(
                f"takes {clean(', '.join((*layout.inputs, *layout.targets)))}; {len(layout.parameters)} parameters and the state of {optimizer}"
            )
        )
        console.print(Text(f"gives {layout.loss}, and X.next for the {len(layout.carried)} inputs X that go round"))
        if layout.untrained:
            console.print(Text(f"the loss does not depend on {clean(', '.join(layout.untrained))}: they stay as they are"))
