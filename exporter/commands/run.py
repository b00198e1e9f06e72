"""pythonop run."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

import exporter
from exporter.commands._shared import Failure, reported, run_setups, setup_option, status, writable
from exporter.inspect import clean, read_model

__all__ = ["run"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--allow", multiple=True, metavar="PATTERN", help="Functions that the file may run: module:qualname or a glob over it. May be repeated.")
@click.option("--inputs", type=click.Path(path_type=Path), help="An .npz file with an array an input. Default: random numbers, symbolic sizes as --size.")
@click.option("--size", default=2, type=click.IntRange(min=1), help="The symbolic sizes of random inputs. Default: 2.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the outputs to this .npz file.")
@click.option("--reference", is_flag=True, help="Run on onnx.reference in place of onnxruntime.")
@setup_option
@click.option("--json", "as_json", is_flag=True, help="Print the outputs' facts as JSON.")
@click.pass_context
def run(
    context: click.Context,
    file: Path,
    allow: tuple[str, ...],
    inputs: Path | None,
    size: int,
    output: Path | None,
    reference: bool,
    setups: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run an ONNX FILE. Functions that it names run only where --allow or --register says so."""
    if output is not None:
        writable(output)
    with reported(context):
        run_setups(setups)
        read_model(file)  # a damaged file is our error, not the engine's
        with status(f"loading {file}", as_json):
            engine: Any = exporter.reference_evaluator(file, allow=allow) if reference else exporter.inference_session(file, allow=allow)
        with status(f"running {file}", as_json):
            names = [value.name or "" for value in read_model(file).graph.outputs]
            feeds = _read(inputs) if inputs is not None else _random(file, size)
            try:
                results = dict(zip(names, engine.run(None, feeds), strict=True))
            except (exporter.PythonopError, Failure):
                raise
            except Exception as error:
                if context.obj["traceback"]:
                    raise
                raise Failure(f"the run failed with {type(error).__name__}: {str(error).strip()[:1000]}") from error
        if output is not None:
            _write(output, results)
        facts = {name: _facts(np.asarray(array)) for name, array in results.items()}
        if as_json:
            click.echo(json.dumps(facts))
            return
        table = Table("output", "type", "shape", "mean", "min", "max")
        for name, fact in facts.items():
            table.add_row(*(Text(clean(str(text))) for text in (name, fact["dtype"], fact["shape"], *(f"{fact[k]:.6g}" if k in fact else "" for k in ("mean", "min", "max")))))
        Console(highlight=False).print(table)


def _facts(array: np.ndarray) -> dict[str, Any]:
    facts: dict[str, Any] = {"dtype": str(array.dtype), "shape": list(array.shape)}
    if array.dtype.kind in "fiub" and array.size:
        wide = array.astype(np.float64)
        facts.update(mean=float(wide.mean()), min=float(wide.min()), max=float(wide.max()))
    return facts


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as data:
            return {name: data[name] for name in data}
    except (OSError, ValueError, AttributeError) as error:
        raise Failure(f"cannot read the inputs in {path}: {error}") from error


def _write(path: Path, arrays: dict[str, Any]) -> None:
    try:
        handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".npz")
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)
        os.replace(draft, path)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror or error}") from error


def _random(path: Path, size: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    feeds = {}
    for value in read_model(path).graph.inputs:
        if value.dtype is None or value.shape is None or value.name is None:
            raise Failure(f"the input {value.name} has no static type and rank: give --inputs")
        shape = [dim if isinstance(dim, int) else size for dim in value.shape]
        dtype = value.dtype.numpy()
        if value.dtype.is_floating_point():
            feeds[value.name] = generator.standard_normal(shape).astype(dtype)
        else:
            feeds[value.name] = np.zeros(shape, dtype)
    return feeds
