"""pythonop tangent."""

from __future__ import annotations

from pathlib import Path

import click
import onnx_ir as ir

import exporter
from exporter.commands.gradient import derivative_options, write_derivative
from symbolics.node.metadata import tangents_of

__all__ = ["tangent"]


@click.command()
@derivative_options("tangent graph", "that moves.", "An output whose tangent is wanted.")
@click.pass_context
def tangent(
    context: click.Context,
    file: Path,
    output: Path,
    wrt: tuple[str, ...],
    outputs: tuple[str, ...],
    external_data: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Write the forward-mode derivative of an ONNX FILE: any model, from any exporter.

    The new file takes a tangent for each NAME of --wrt, and gives those of the outputs: the Jacobian times a direction.
    """

    def build(model: ir.Model) -> ir.Model:
        return exporter.build_tangent_graph(model, wrt=wrt or None, outputs=outputs or None)

    write_derivative(context, file, output, external_data, check, as_json, "tangent", build, tangents_of)
