"""Sizes that several inputs of a file share by one name: what to say where they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from symbolics.errors import ArgumentError
from symbolics.text import clean

__all__ = ["check_shared", "different"]


def different(size: str, one: tuple[str, int], other: tuple[str, int]) -> str:
    """The message where two inputs, each with its number, should have one size.

    Args:
        size: Its name in the file.
        one, other: The name of an input, and the number that it has.
    """
    return (
        f"{clean(one[0])!r} has {one[1]} {clean(size)}, {clean(other[0])!r} has {other[1]}: the file has one size {clean(size)!r} for both"
    )


def check_shared(declared: Mapping[str, Sequence[tuple[int, str]]], given: Iterable[tuple[str, Any]]) -> None:
    """Compare sizes that share a name. What is no tensor of the declared rank, onnxruntime refuses by the input's name.

    Args:
        declared: Input -> the axes whose size has a name, with that.
        given: The inputs with their tensors.

    Raises:
        ArgumentError: Two inputs have different numbers in such a size.
    """
    seen: dict[str, tuple[str, int]] = {}
    for name, value in given:
        for axis, size in declared.get(name, ()):
            if axis < value.dim() and (first := seen.setdefault(size, (name, value.shape[axis])))[1] != value.shape[axis]:
                raise ArgumentError(different(size, first, (name, value.shape[axis])))
