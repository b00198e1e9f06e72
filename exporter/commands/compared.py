"""On what two files are compared: the inputs of each run, and what somebody should know of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import onnx
from click.core import ParameterSource

from exporter.commands.arrays import read_arrays
from exporter.commands.run import sizes_of
from exporter.commands.run_file import default_sizes, several_feeds, sizes_hint
from exporter.commands.shared import Failure
from symbolics.text import shown
from symbolics.users import warn

__all__ = ["compared_feeds"]


def compared_feeds(
    context: click.Context, proto: onnx.ModelProto, runs: int, inputs: Path | None, dims: tuple[str, ...], *, in_python: str
) -> tuple[list[dict[str, Any]], list[str], str]:
    """The inputs of --runs or --compare, one where all runs would be the same.

    Args:
        context: The command.
        proto: The model that takes them.
        runs, inputs, dims: What the options say.
        in_python: The call of Python that takes a data set.

    Returns:
        The arrays of each run, lines for the report, and what to say where a model cannot be run on them.

    Raises:
        Failure, RunError, FormatError: An option does not fit the file. Failure: all inputs would be zeros.
    """
    arrays: Mapping[str, Any] = read_arrays(inputs) if inputs is not None else {}
    sizes = sizes_of(dims)
    feeds = several_feeds(proto, arrays, sizes, runs)
    zeros = [name for name, array in feeds[0].items() if name not in arrays and array.size and not array.any()]
    if zeros and len(zeros) == len(feeds[0]):
        raise Failure(
            f"nothing makes up {', '.join(map(shown, zeros[:4]))}: integers and flags are zeros, on which nothing is compared. Way out: --inputs FILE.npz"
        )
    if len(feeds) < runs and context.get_parameter_source("runs") is ParameterSource.COMMANDLINE:
        warn(f"no input is random, so all {runs} runs would be the same: one is made. A data set is compared in Python: {in_python}")
    twos = default_sizes(proto, arrays, sizes)
    made_up = {"size 2, as no --dim says another": twos, "zeros, as no --inputs gives them": zeros}
    notes = [f"  {what}: {', '.join(map(shown, names[:8]))}{', ...' if len(names) > 8 else ''}" for what, names in made_up.items() if names]
    return feeds, notes, sizes_hint(proto, arrays, sizes)
