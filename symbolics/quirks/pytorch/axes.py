"""Axes that are counted from the end, where TorchScript's exporter takes every axis for one that is counted from the front."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk

__all__ = ["AXES", "QUIRK"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript writes a Transpose with the negative axes of permute and movedim; its squeeze takes no list of axes",
)


def _from_the_front(axes: Any, rank: int | None) -> list[int] | None:
    """Constant axes, counted from the front; None where they are computed, or the rank is unknown."""
    numbers = private.torchscript_numbers(axes)
    return None if numbers is None or rank is None else [axis % max(rank, 1) for axis in numbers]


def _permute(original: Any, g: Any, x: Any, axes: Any) -> Any:
    numbers = private.torchscript_numbers(axes)
    return original(g, x, axes if numbers is None else _from_the_front(axes, len(numbers)))


def _movedim(original: Any, g: Any, x: Any, source: Any, destination: Any) -> Any:
    given = [(axes, _from_the_front(axes, x.type().dim())) for axes in (source, destination)]
    return original(g, x, *(axes if front is None else torch.tensor(front) for axes, front in given))


def _squeeze(original: Any, g: Any, x: Any, axes: Any = None) -> Any:
    front = None if axes is None else _from_the_front(axes, x.type().dim())
    if front is None:
        return original(g, x, axes)
    for axis in sorted(front, reverse=True):
        x = original(g, x, axis)
    return x


#: In place of the symbolic functions of torch.onnx.export(dynamo=False).
AXES: dict[str, Callable[..., Any]] = {
    "aten::permute": _permute,
    "aten::movedim": _movedim,
    "aten::moveaxis": _movedim,
    "aten::squeeze": _squeeze,
}
