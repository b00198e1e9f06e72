"""A table of models of packages that torch.onnx refuses, and what `opaque=` makes of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tests.end_to_end.wild.models import Net

__all__ = ["MODELS", "Net", "Row", "imported", "row"]


@dataclass(frozen=True)
class Row:
    """One model.

    Attributes:
        make: Returns the model, in the mode to export, and its arguments.
        package: As PyPI has it.
        module: What has to be importable.
        title: What the model is, for docs/opaque-models.md.
        opaque: What the export is given.
        loose: What an iterative solver's own tolerance comes to, where it stops earlier or later for the last bit of what it is given.
    """

    make: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    package: str
    module: str
    title: str
    opaque: Any = "missing"
    loose: float = 0.0


MODELS: dict[str, Row] = {}


def row(package: str, title: str, module: str = "", **options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Enter a function that makes a model into the table, by its name."""

    def add(make: Callable[[], Any]) -> Callable[[], Any]:
        MODELS[make.__name__.strip("_")] = Row(make, package, module or package, title, **options)
        return make

    return add


def imported(module: str) -> Any:
    """A module of a package that need not be installed."""
    return importlib.import_module(module)
