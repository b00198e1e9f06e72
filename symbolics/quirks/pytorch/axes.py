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
    wrong="TorchScript writes a Transpose with the negative axes of permute and movedim; its squeeze takes no list of axes; its diagonal is an If with an empty tensor of float32",
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


def _diagonal(original: Any, g: Any, x: Any, offset: Any, dim1: Any, dim2: Any) -> Any:
    """Every so many places of the two axes as one."""
    numbers, rank = [private.torchscript_numbers(value) for value in (offset, dim1, dim2)], x.type().dim()
    if None in numbers or rank is None or x.type().scalarType() in (None, "Float"):
        return original(g, x, offset, dim1, dim2)
    start, *pair = (number[0] for number in numbers)  # type: ignore[index]
    pair = [axis % rank for axis in pair]
    x = g.op("Transpose", x, perm_i=[*(axis for axis in range(rank) if axis not in pair), *pair])

    def whole(value: int | list[int]) -> Any:
        return g.op("Constant", value_t=torch.tensor(value))

    x = g.op("Slice", x, whole([abs(start)]), whole([2**62]), whole([rank - 1 if start >= 0 else rank - 2]))
    shape = g.op("Shape", x)
    rows, columns = (g.op("Gather", shape, whole(axis)) for axis in (rank - 2, rank - 1))
    length, step = g.op("Min", rows, columns), g.op("Add", columns, whole(1))
    places = g.op("Mul", g.op("Range", whole(0), length, whole(1)), step)
    outer = g.op("Slice", shape, whole([0]), whole([rank - 2]), whole([0]))
    flat = g.op("Reshape", x, g.op("Concat", outer, g.op("Mul", g.op("Unsqueeze", rows, whole([0])), columns), axis_i=0))
    return g.op("Gather", flat, places, axis_i=rank - 2)


#: In place of the symbolic functions of torch.onnx.export(dynamo=False).
AXES: dict[str, Callable[..., Any]] = {
    "aten::permute": _permute,
    "aten::movedim": _movedim,
    "aten::moveaxis": _movedim,
    "aten::squeeze": _squeeze,
    "aten::diagonal": _diagonal,
}
