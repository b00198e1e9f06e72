"""The data files of a model, as facts: where they are, and what is wrong with them. Nothing of them is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from exporter.files.read import open_model
from exporter.files.tensors import check_place, check_there, data_files, external_tensors
from symbolics.errors import FormatError, PythonopError

__all__ = ["DataFacts", "data_beside", "data_of"]


@dataclass
class DataFacts:
    """A file that values of a model are in.

    Attributes:
        location: What the model says of where it is.
        tensors: How many tensors have their values there.
        bytes: How many bytes these are, without those that are wrong.
        error: What is wrong with the first that is wrong, None for nothing.
    """

    location: str
    tensors: int = 0
    bytes: int = 0
    error: str | None = None


def data_beside(file: Path) -> set[Path]:
    """The files that values of a model are in; none of a model that cannot be read."""
    try:
        return data_files(open_model(file, data=False))
    except (PythonopError, OSError):
        return set()


def data_of(model: ir.Model) -> list[DataFacts]:
    """The data files of a model, each once: what `open_model` and `check_data` refuse is an ``error`` here."""
    found: dict[str, DataFacts] = {}
    for tensor in external_tensors(model):
        location = str(tensor.location)
        facts = found.setdefault(location, DataFacts(location))
        facts.tensors += 1
        try:
            check_place(tensor)
            check_there(tensor)
        except FormatError as error:
            facts.error = facts.error or str(error)
        else:
            facts.bytes += tensor.nbytes
    return list(found.values())
