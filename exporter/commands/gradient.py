"""pythonop gradient."""

from __future__ import annotations

from pathlib import Path

import click

import exporter
from exporter.commands.shared import Failure, external_data_option, json_option, reported, status, tell
from exporter.files.program import save_model
from exporter.files.read import open_model
from exporter.files.save import writable
from exporter.files.tensors import data_files
from symbolics.node.metadata import pairing_of
from symbolics.text import clean

__all__ = ["gradient"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The training graph to write.")
@click.option(
    "--wrt",
    multiple=True,
    metavar="NAME",
    help="An initializer or input to differentiate with respect to. May be repeated. Default: trainable parameters and float inputs.",
)
@click.option(
    "--of", "outputs", multiple=True, metavar="NAME", help="An output to differentiate. May be repeated. Default: every float output."
)
@external_data_option
@json_option
@click.pass_context
def gradient(
    context: click.Context, file: Path, output: Path, wrt: tuple[str, ...], outputs: tuple[str, ...], external_data: bool, as_json: bool
) -> None:
    """Write the gradient graph of an ONNX FILE: any model, from any exporter."""
    writable(output, Failure, keep=[file])
    with reported(context):
        with status(f"building the gradient graph of {file}", as_json):
            model = open_model(file)
            writable(output, Failure, keep=data_files(model))
            forward = len(list(model.graph.all_nodes()))
            training = exporter.build_gradient_graph(model, wrt=wrt or None, outputs=outputs or None)
        with status(f"writing {output}", as_json):
            save_model(training, output, external_data=external_data or None)
        pairing = pairing_of(training)
        assert pairing is not None
        nodes = len(list(training.graph.all_nodes()))
        written = {"file": str(output), "bytes": output.stat().st_size, "nodes": nodes, "forward_nodes": forward}
        pairs = {"inputs": dict(pairing.inputs), "outputs": dict(pairing.outputs), "unreached": list(pairing.unreached)}
        zero = f", {len(pairing.unreached)} of them zero: nothing depends on them" if pairing.unreached else ""
        lines = (
            f"wrote {clean(str(output))} ({written['bytes']:,} bytes, {nodes} nodes; forward {forward})",
            f"takes {', '.join(clean(name) for name in pairing.inputs.values())}",
            f"gives {len(pairing.outputs)} gradients{zero}",
        )
        tell({**written, **pairs}, lines, as_json)
