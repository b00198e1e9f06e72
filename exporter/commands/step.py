"""pythonop step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

import exporter
from exporter.commands import shared
from exporter.commands.inputs import input_options, load_case
from exporter.commands.providers import placement_option
from exporter.commands.written import Written
from exporter.files.save import writable
from exporter.files.trained import MANIFEST
from symbolics.optimizers import OPTIMIZERS
from symbolics.text import clean

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


def _recompute(_: click.Context, __: click.Parameter, given: str | None) -> Any:
    if given is None or given == "auto":
        return given
    if not given.isdecimal():
        raise click.BadParameter(f"{given!r} is neither auto nor a number of bytes")
    return int(given)


@click.command()
@click.argument("target")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The training step to write; OUTPUT's stem.init.onnx beside it gives the initial state.",
)
@click.option(
    "--artifacts",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write training.onnx, eval.onnx, initial.onnx and manifest.json into this folder: all that a program in another language needs.",
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
@click.option("--clip-value", type=float, help="Clip each number of the gradients to this, either way.")
@click.option("--ema", type=float, metavar="SHARE", help="Keep an average of the weights too, of which this share stays at a step: 0.999.")
@click.option("--accumulate", type=click.IntRange(min=1), default=1, show_default=True, help="Update every so many runs.")
@click.option("--precision", type=click.Choice(["float16", "bfloat16"]), help="Compute in this type; parameters keep theirs.")
@click.option(
    "--recompute",
    metavar="auto|BYTES",
    callback=_recompute,
    help="Compute values of the forward again in the backward: what is cheap (auto), or so that at most BYTES are kept between them.",
)
@click.option(
    "--for",
    "written_for",
    type=click.Choice(["webgpu", "openvino"]),
    help="Write the files in the forms that this execution provider takes: webgpu for a page that trains on a graphics card.",
)
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
@click.option("--external-data", is_flag=True, help="Keep the tensors in a file beside each model.")
@shared.check_option
@placement_option
@shared.json_option
@shared.loudness
@click.pass_context
def step(
    context: click.Context,
    target: str,
    output: Path | None,
    artifacts: Path | None,
    optimizer: str,
    hyperparameters: dict[str, Any],
    clip_norm: float | None,
    clip_value: float | None,
    ema: float | None,
    accumulate: int,
    precision: str | None,
    recompute: Any,
    written_for: str | None,
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
    external_data: bool,
    check: bool,
    providers: list[Any] | None,
    as_json: bool,
) -> None:
    """Write forward, loss, gradients and optimizer as one ONNX model. TARGET's Case names the loss and example targets."""
    if output is None and artifacts is None:
        raise shared.Failure(
            "nothing to write: give a file for the step (-o), a folder for step, evaluation and manifest (--artifacts), or both"
        )
    from exporter.training.artifacts import (
        export_evaluation,
        places,
        with_state_inputs,
        write_artifacts,
    )  # loads torch, which --help does without

    files = [] if output is None else [output, output.parent / f"{output.stem}.init.onnx"]
    for number, file in enumerate(files):
        writable(file, shared.Failure, keep=files[:number])
    folder = [] if artifacts is None else places(artifacts, shared.Failure, keep=files)
    with shared.reported(context):
        with shared.status(f"importing {target}", as_json):
            shared.run_setups(setups)
            case = load_case(target, inputs, dynamic, targets=True)
            wanted = shared.portable_of(case, portable, portable_only)
        options: dict[str, Any] = {
            "targets": case.targets, "dynamic_shapes": case.dynamic_shapes, "precision": precision, "dynamo": dynamo, "opset_version": opset,
            "inline": (*case.inline, *inline), "portable": wanted, "opaque": shared.opaque_of(case, opaque),
            "functions": shared.functions_of(case, functions),
            "fallback": fallback or case.fallback, "eager_check": eager_check,
            "output_names": output_names or None, "loss": case.loss,
        }  # fmt: skip
        with shared.status(f"exporting a training step of {type(case.model).__name__}", as_json), shared.explained(context):
            program = exporter.export_training_step(
                case.model, case.args, case.kwargs, optimizer=optimizer, hyperparameters=hyperparameters, clip_norm=clip_norm,
                clip_value=clip_value, ema=ema, accumulate=accumulate, recompute=recompute, **options,
            )  # fmt: skip
            evaluation = export_evaluation(case.model, case.args, case.kwargs, **options) if artifacts is not None else None
        program = program if written_for is None else program.written_for(written_for)
        path, initial = files or (folder[0], folder[2])
        layout = program.layout
        assert layout is not None
        models = [(program.model, path), (program.initial_model, initial)]
        if evaluation is not None:
            models.append((with_state_inputs(evaluation.model, layout), folder[1]))
        unchecked = shared.checked(models, check, as_json)
        placed = _placed(program, providers, as_json)
        with shared.status(f"writing {output or artifacts}", as_json):
            if output is not None:
                program.save(output, external_data=external_data or None, check=False)
            if artifacts is not None and evaluation is not None:
                made = write_artifacts(
                    program, evaluation, artifacts, provider=written_for, external_data=external_data or None, check=False
                )
                folder = [file for file in folder if file.name in (*made["files"].values(), MANIFEST)]
        nodes, step_file = len(list(program.model.graph.all_nodes())), Written.of(path)
        written = {
            **step_file.facts, "initial": str(initial), "nodes": nodes, "inlined": program.inlined,
            "artifacts": [str(file) for file in folder], "portable": shared.portable_facts(program), "unchecked": unchecked,
            **({} if placed is None else {"placements": placed}),
        }  # fmt: skip
        said = {"inputs": layout.inputs, "targets": layout.targets, "carried": layout.carried, "untrained": layout.untrained}
        takes = clean(", ".join((*layout.inputs, *layout.targets)))
        lines = [
            step_file.said(f", {nodes} nodes"),
            f"{Written.of(initial).said()}, which gives the initial state",
            f"takes {takes}; {len(layout.parameters)} parameters and the state of {optimizer}",
            f"gives {layout.loss}, and X.next for the {len(layout.carried)} inputs X that go round",
        ]
        if artifacts is not None:
            lines.append(f"wrote {', '.join(file.name for file in folder)} into {clean(str(artifacts))}")
        if placed is not None:
            from exporter.runtime.placements import said_of_placements

            lines += said_of_placements(placed)
        lines += [*unchecked, *shared.portable_lines(program)]
        if layout.untrained:
            lines.append(f"the loss does not depend on {clean(', '.join(layout.untrained))}: they stay as they are")
        shared.tell({**written, **said}, lines, as_json)


def _placed(program: Any, providers: list[Any] | None, quiet: bool) -> dict[str, dict[str, int]] | None:
    """Which of the execution providers that were asked for runs what of a step; None where none was."""
    if providers is None:
        return None
    from exporter.runtime.placements import placements  # loads onnxruntime

    with shared.status("opening the step on its providers", quiet):
        return placements(program.model_proto, providers)
