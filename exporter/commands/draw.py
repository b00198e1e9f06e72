"""pythonop draw."""

from __future__ import annotations

from pathlib import Path

import click

from exporter.commands.shared import Failure, json_option, loudness, one_message, reported, status, tell
from exporter.files.read import open_model
from exporter.files.save import saving, writable
from exporter.files.tensors import data_files
from symbolics.errors import PythonopError
from symbolics.text import clean

__all__ = ["draw"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The picture to write: .svg, or .html for a page that opens modules and searches.",
)
@click.option("--depth", type=click.IntRange(min=0), help="How many levels of modules are open. Default: as many as 150 boxes allow.")
@json_option
@loudness
@click.pass_context
def draw(context: click.Context, file: Path, output: Path, depth: int | None, as_json: bool) -> None:
    """Draw the graph of an ONNX FILE by modules: its forward, its gradient beside it, PythonOps and where gradients stop in colour.

    Nothing of the file is run or imported. Needs the extra draw: pip install '.[draw]' in a clone.
    """
    writable(output, Failure, keep=[file])
    kind = output.suffix.lower()
    if kind not in (".svg", ".html"):
        raise Failure(f"-o {output}: pictures are .svg or .html; a browser or an SVG tool makes other formats of an .svg")
    with reported(context):
        from exporter.pictures.draw import draw_html, draw_svg
        from exporter.pictures.layout import missing

        if (problem := missing()) is not None:
            raise Failure(problem)
        model = open_model(file, data=False)
        writable(output, Failure, keep=data_files(model))
        with status(f"drawing {file}", as_json), one_message(context, "the drawing"):
            text = (draw_svg if kind == ".svg" else draw_html)(model, file.name, depth)
        with saving(PythonopError) as files:
            files.open(output).write(text.encode())
        size = output.stat().st_size
        tell({"file": str(output), "bytes": size}, [f"wrote {clean(str(output))} ({size:,} bytes)"], as_json)
