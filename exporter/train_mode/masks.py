"""The numbers that dropout's masks come from: of one seed every runtime and every execution provider makes the same ones.

Integers are no common ground: some execution providers compute int64 in int32, some have no uint32. So all numbers here are
float32 fractions in [0, 1) of few bits, and each sum and product of them is exact, in whatever order a compiler computes it.
Positions of elements are rows of 4096. A row and a column have four numbers of 12 bits each, which depend on nothing else; a key of a
seed is added to the rows'. An element's number mixes those of its row and its column: squares, of which the middle bits go on
(von Neumann's middle-square step), with a number of the row or the column added to each.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["DIGITS", "LANES", "WIDTH", "Arithmetic", "bits", "first_keys", "kept_by", "keys", "keys_of_pass", "table", "units"]

#: Elements in a row.
WIDTH = 4096
#: Numbers of a row, of a column and of a key.
LANES = 4
#: The bits of a seed that make its digits, of 12, 12 and 7 bits. The lower two are those of the number of a pass.
#: Masked so, each is exact as a float32, and no execution provider has to divide integers: some do that in float32.
DIGITS = (0xFFF, 0xFFF << 12, 0x7F << 24)

_STEP = 1 / WIDTH


class Arithmetic(Protocol):
    """What the numbers are computed with: the nodes of a graph (`symbolics.graph.emitter.Emitter`) or numpy, all float32."""

    Add: Any
    Floor: Any
    Mul: Any
    Sub: Any


class _Numpy:
    """The arithmetic in numpy."""

    Add = staticmethod(functools.partial(np.add, dtype=np.float32))
    Floor = staticmethod(np.floor)
    Mul = staticmethod(functools.partial(np.multiply, dtype=np.float32))
    Sub = staticmethod(functools.partial(np.subtract, dtype=np.float32))


@functools.cache
def _constants(name: str, *shape: int) -> np.ndarray:
    """Fractions of 12 bits that no rule connects: the bytes that SHAKE-128 makes of a text, two each."""
    found = hashlib.shake_128(name.encode()).digest(2 * math.prod(shape))
    return ((np.frombuffer(found, "<u2") % WIDTH) * _STEP).astype(np.float32).reshape(shape)


def _fraction(op: Arithmetic, x: Any) -> Any:
    return op.Sub(x, op.Floor(x))


def _stir(op: Arithmetic, x: Any, more: Any) -> Any:
    """A fraction of 12 bits: bits 6 to 18 of the square of one, plus another one."""
    middle = op.Mul(op.Floor(op.Mul(op.Mul(x, x), 2.0**18)), _STEP)
    return _fraction(op, op.Add(middle, more))


def table(op: Arithmetic, index: Any) -> Any:
    """The numbers of columns and rows.

    Args:
        op: Computes.
        index: float32 of shape [1, n]: a column as it is, from 0 to 4095, a row plus 4096; below 2**24.

    Returns:
        float32 of shape [4, n].
    """
    constants = _constants("table", 5, LANES, 1)
    place = op.Mul(index, _STEP)
    high = op.Floor(place)
    low, high = op.Sub(place, high), op.Mul(high, _STEP)
    x = _fraction(op, op.Add(low, constants[0]))
    for part, constant in zip((high, low, high, low), constants[1:], strict=True):
        x = _stir(op, x, op.Add(part, constant))
    return x


def first_keys(count: int) -> np.ndarray:
    """Of the nodes, before they know the seed: float32 of shape [count, 4]."""
    return np.concatenate([_first_key(number) for number in range(count)])


def _first_key(number: int) -> np.ndarray:
    return _constants(f"node {number}", 1, LANES)


def keys(op: Arithmetic, first: Any, digits: Sequence[Any]) -> Any:
    """The keys of nodes in a run.

    Args:
        op: Computes.
        first: `first_keys`.
        digits: Of the seed (`DIGITS`), each a float32 vector of one element that is divided by 4096.

    Returns:
        float32 of the shape of ``first``.
    """
    x = _fraction(op, op.Add(first, digits[0]))
    for more in (*digits[1:], *_constants("seed", 2, LANES)):
        x = _stir(op, x, more)
    return x


def keys_of_pass(op: Arithmetic, key: Any, digits: Sequence[Any]) -> Any:
    """The key of a node in a pass through a body: of its key outside, and of the digits of the number of the pass."""
    for more in (*digits, *_constants("pass", 2, LANES)):
        key = _stir(op, key, more)
    return key


def bits(op: Arithmetic, rows: Sequence[Any], columns: Sequence[Any]) -> Any:
    """The numbers of all elements.

    Args:
        op: Computes.
        rows: The four numbers of each row, the key added to each: float32 of shape [n, 1], each below 2.
        columns: The four numbers of each column: float32 of shape [1, m].

    Returns:
        float32 of shape [n, m]: multiples of 2**-18 in [0, 1).
    """
    finer = op.Add(columns[3], op.Mul(op.Floor(op.Mul(columns[1], 64.0)), 2.0**-18))
    x = _fraction(op, op.Add(rows[0], columns[0]))
    x = _stir(op, x, rows[1])
    x = _stir(op, x, columns[2])
    last = _fraction(op, op.Mul(op.Mul(x, x), 64.0))
    return _fraction(op, op.Add(last, op.Add(rows[3], finer)))


def kept_by(seed: int, number: int, shape: Sequence[int], ratio: float, passes: Sequence[int] = ()) -> np.ndarray:
    """`exporter.train_mode.dropout.dropout_mask`."""
    op = _Numpy()
    size = math.prod(shape)
    key = keys(op, _first_key(number), _digits(seed, DIGITS))
    for count in passes:
        key = keys_of_pass(op, key, _digits(count, DIGITS[:2]))
    rows = max(-(-size // WIDTH), 1)
    found = table(op, np.arange(WIDTH + rows, dtype=np.float32)[None])
    drawn = bits(op, [*op.Add(found[:, WIDTH:, None], key.reshape(LANES, 1, 1))], [*found[:, None, :WIDTH]])
    return (drawn.reshape(-1)[:size] >= np.float32(ratio)).reshape(shape)


def units(digits: Sequence[int]) -> np.ndarray:
    """What makes fractions of digits: a float32 each."""
    return np.array([2.0 ** -(12 * (place + 1)) for place in range(len(digits))], np.float32)


def _digits(number: int, digits: Sequence[int]) -> list[np.ndarray]:
    return [np.array([(number & digit) * unit], np.float32) for digit, unit in zip(digits, units(digits).tolist(), strict=True)]
