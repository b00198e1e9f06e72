"""pythonop gradient, and what it shares with pythonop tangent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import onnx_ir as ir

import exporter
from exporter.commands.shared import Failure, check_option, checked, external_data_option, json_option, loudness, reported, status, tell
from exporter.commands.written import Written
from exporter.files.program import save_model
from exporter.files.read import open_model
from exporter.files.save import writable
from exporter.files.tensors import data_files
from symbolics.node.metadata import GradientPairing, TangentPairing, pairing_of
from symbolics.text import clean

__all__ = ["derivative_options", "gradient", "write_derivative"]


def derivative_options(what: str, moves: str, of: str) -> Callable[[Any], Any]:
    """The options of a command that writes a file with a derivative: where to, with respect to what, of which outputs."""

    def add(function: Any) -> Any:
        for option in (
            loudness,
            json_option,
            check_option,
            external_data_option,
            click.option("--of", "outputs", multiple=True, metavar="NAME", help=f"{of} May be repeated. Default: every float output."),
            click.option(
                "--wrt",
                multiple=True,
                metavar="NAME",
                help=f"An initializer or input {moves} May be repeated. Default: trainable parameters and float inputs.",
            ),
            click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help=f"The {what} to write."),
            click.argument("file", type=click.Path(path_type=Path)),
        ):
            function = option(function)
        return function

    return add


def write_derivative(
    context: click.Context,
    file: Path,
    output: Path,
    external_data: bool,
    check: bool,
    as_json: bool,
    what: str,
    build: Callable[[ir.Model], ir.Model],
    pairing_of: Callable[[ir.Model], GradientPairing | TangentPairing | None],
) -> None:
    """Read a model, build what ``what`` names, write it, and tell of it."""
    writable(output, Failure, keep=[file])
    with reported(context):
        with status(f"building the {what} graph of {file}", as_json):
            model = open_model(file)
            writable(output, Failure, keep=data_files(model))
            forward = len(list(model.graph.all_nodes()))
            built = build(model)
        unchecked = checked([(built, output)], check, as_json)
        with status(f"writing {output}", as_json):
            save_model(built, output, external_data=external_data or None, check=False)
        pairing = pairing_of(built)
        assert pairing is not None
        nodes = len(list(built.graph.all_nodes()))
        of_model = Written.of(output)
        written = {**of_model.facts, "nodes": nodes, "forward_nodes": forward, "unchecked": unchecked}
        pairs = {"inputs": dict(pairing.inputs), "outputs": dict(pairing.outputs), "unreached": list(pairing.unreached)}
        why = "nothing depends on them" if isinstance(pairing, GradientPairing) else "they depend on nothing that moves"
        zero = f", {len(pairing.unreached)} of them zero: {why}" if pairing.unreached else ""
        lines = (
            of_model.said(f", {nodes} nodes; forward {forward}"),
            f"takes {', '.join(clean(name) for name in pairing.inputs.values())}",
            f"gives {len(pairing.outputs)} {what}{'' if len(pairing.outputs) == 1 else 's'}{zero}",
            *unchecked,
        )
        tell({**written, **pairs}, lines, as_json)


def _feed(model: ir.Model) -> None:
    """Let the initializers that have a gradient be fed: they become inputs as well, with their values as defaults."""
    pairing = pairing_of(model)
    assert pairing is not None
    for name in pairing.outputs:
        value = model.graph.initializers.get(name)
        if value is not None and not value.is_graph_input():
            model.graph.inputs.append(value)


@click.command()
@derivative_options("training graph", "to differentiate with respect to.", "An output to differentiate.")
@click.option(
    "--feed-weights", is_flag=True, help="Let what is trained be fed at each run: inputs of the file, with its values as defaults."
)
@click.pass_context
def gradient(
    context: click.Context,
    file: Path,
    output: Path,
    wrt: tuple[str, ...],
    outputs: tuple[str, ...],
    feed_weights: bool,
    external_data: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Write the gradient graph of an ONNX FILE: any model, from any exporter."""

    def build(model: ir.Model) -> ir.Model:
        built = exporter.build_gradient_graph(model, wrt=wrt or None, outputs=outputs or None)
        if feed_weights:
            _feed(built)
        return built

    write_derivative(context, file, output, external_data, check, as_json, "gradient", build, pairing_of)
