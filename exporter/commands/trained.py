"""pythonop trained."""

from __future__ import annotations

from pathlib import Path

import click

import exporter
from exporter.commands.shared import Failure, check_option, checked, external_data_option, json_option, loudness, reported, status, tell
from exporter.commands.written import Written
from exporter.files.data_facts import data_beside
from exporter.files.program import save_model
from exporter.files.save import writable
from exporter.files.tensors import data_files
from exporter.files.trained import files_of
from symbolics.node.metadata import read_state

__all__ = ["trained"]


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("state", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The model to write.")
@click.option("--ema", is_flag=True, help="Take the averages of the parameters, of a step that was exported with --ema.")
@external_data_option
@check_option
@json_option
@loudness
@click.pass_context
def trained(
    context: click.Context, folder: Path, state: Path, output: Path, ema: bool, external_data: bool, check: bool, as_json: bool
) -> None:
    """Write what a training has learned as one ONNX model: the evaluation of a FOLDER of artifacts with a saved STATE.

    FOLDER is what `pythonop step --artifacts` wrote, STATE a file with what save() of a trainer gave, in Python, Node.js or a browser.
    """
    writable(output, Failure, keep=[state, *files_of(folder)])
    with reported(context):
        with status(f"reading {state}", as_json):
            program = exporter.trained(folder, state, ema=ema)
            writable(output, Failure, keep=[*data_files(program.model), *(data for each in files_of(folder) for data in data_beside(each))])
        unchecked = checked([(program.model, output)], check, as_json)
        with status(f"writing {output}", as_json):
            save_model(program.model, output, external_data=external_data or None, check=False)
        entries = read_state(program.model.metadata_props) or {}
        kinds = {kind: sum(entry.kind == kind for entry in entries.values()) for kind in ("parameter", "buffer")}
        of_model = Written.of(output)
        facts = {**of_model.facts, "parameters": kinds["parameter"], "buffers": kinds["buffer"], "unchecked": unchecked}
        line = f"{of_model.said()}: {kinds['parameter']} parameters, {kinds['buffer']} buffers"
        tell(facts, (line, *unchecked), as_json)
