"""pythonop gradient."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

import exporter
from exporter.commands.shared import reported, status, writable
from exporter.files.program import save_model
from exporter.files.read import open_model
from symbolics.node.metadata import read_pairing
from symbolics.node.text import clean

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
@click.option("--external-data", is_flag=True, help="Keep the tensors in OUTPUT.data beside the file.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
@click.pass_context
def gradient(
    context: click.Context, file: Path, output: Path, wrt: tuple[str, ...], outputs: tuple[str, ...], external_data: bool, as_json: bool
) -> None:
    """Write the gradient graph of an ONNX FILE: any model, from any exporter."""
    writable(output)
    with reported(context):
        with status(f"building the gradient graph of {file}", as_json):
            model = open_model(file)
            forward = len(list(model.graph.all_nodes()))
            training = exporter.build_gradient_graph(model, wrt=wrt or None, outputs=outputs or None)
        with status(f"writing {output}", as_json):
            save_model(training, output, external_data=external_data or None)
        pairing = read_pairing(training.metadata_props)
        assert pairing is not None
        nodes = len(list(training.graph.all_nodes()))
        if as_json:
            facts = {"file": str(output), "bytes": output.stat().st_size, "nodes": nodes, "forward_nodes": forward}
            click.echo(
                json.dumps(
                    {**facts, "inputs": dict(pairing.inputs), "outputs": dict(pairing.outputs), "unreached": list(pairing.unreached)}
                )
            )
            return
        console = Console(highlight=False, soft_wrap=True)
        console.print(Text(f"wrote {clean(str(output))} ({output.stat().st_size:,} bytes, {nodes} nodes; forward {forward})"))
        console.print(Text(f"takes {', '.join(clean(name) for name in pairing.inputs.values())}"))
        console.print(
            Text(
                f"gives {len(pairing.outputs)} gradients{f', {len(pairing.unreached)} of them zero: nothing depends on them' if pairing.unreached else ''}"
            )
        )
