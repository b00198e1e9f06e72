"""Weights of 4 bits: a step and a zero point for each group of numbers that are summed up, in uint4."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from exporter.quantization.grids import number_of, order_of

__all__ = ["SIZES", "GroupGrid", "fit_groups"]

#: The sizes of groups that onnxruntime's kernel takes.
SIZES = (16, 32, 64, 128, 256)
_LEVELS = 16
_AT_ONCE = 1 << 22  # numbers: of larger weights, some columns at a time
#: What the ends of a group are drawn in by: few numbers that lie far out cost more levels than they are worth.
_SHRUNK = np.arange(1.0, 0.69, -0.05)


@dataclass(frozen=True)
class GroupGrid:
    """A weight in groups along axis 0: ``(levels - zero) * scale``.

    Attributes:
        levels: 0 to 15, of the weight's shape [K, N].
        scale: [groups, N], float32.
        zero: The level of 0.0, [groups, N].
        group: How many numbers are in a group; the last may have fewer.
        error: The root of the mean square that it is off by, over that of the weight; 0.0 where it is the weight bit by bit.
    """

    levels: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    group: int
    error: float


def fit_groups(weight: np.ndarray, group: int | None) -> GroupGrid:
    """A weight in groups of 16 levels: exactly, where it is on such a grid, as after training with a fake quantiser; otherwise rounded.

    Args:
        weight: [K, N], float32, finite.
        group: The size of a group. None: the largest in which it is exact, or 32.
    """
    sizes = sorted(SIZES, reverse=True) if group is None else [group]
    parts = np.array_split(weight, max(1, weight.size // _AT_ONCE), axis=1)
    for size in sizes:
        if len(weight) >= size or size == sizes[-1]:
            found = []
            for part in parts:
                steps = _exact(_blocks(part, size))
                if steps is None:
                    break
                found.append(steps)
            else:
                return _joined([_grid(part, size, *steps) for part, steps in zip(parts, found, strict=True)], weight)
    size = 32 if group is None else group
    return _joined([_grid(part, size, *_rounded(_blocks(part, size))) for part in parts], weight)


def _joined(grids: list[GroupGrid], weight: np.ndarray) -> GroupGrid:
    """The grids of some columns each, as one."""
    levels, scale, zero = (np.concatenate([getattr(grid, name) for grid in grids], 1) for name in ("levels", "scale", "zero"))
    whole = float((weight.astype(np.float64) ** 2).sum())
    return GroupGrid(levels, scale, zero, grids[0].group, float(np.sqrt(sum(grid.error**2 for grid in grids) / whole)) if whole else 0.0)


def _blocks(weight: np.ndarray, size: int) -> np.ndarray:
    """[groups, size, N]; the last is filled up with 0.0, which is on every grid."""
    missing = -len(weight) % size
    return np.pad(weight, ((0, missing), (0, 0))).reshape(-1, size, weight.shape[1])


def _grid(weight: np.ndarray, size: int, scale: np.ndarray, zero: np.ndarray) -> GroupGrid:
    """The levels of some columns; their error is the root of the sum of squares, which `_joined` relates to the weight."""
    blocks = _blocks(weight, size)
    levels = np.clip(np.rint(blocks / scale[:, None]) + zero[:, None], 0, _LEVELS - 1)
    made = ((levels - zero[:, None]).astype(np.float32) * scale[:, None]).reshape(-1, weight.shape[1])[: len(weight)]
    off = float(np.sqrt(((made.astype(np.float64) - weight) ** 2).sum()))
    levels = levels.reshape(-1, weight.shape[1])[: len(weight)]
    return GroupGrid(levels.astype(np.uint8), scale.astype(np.float32), zero.astype(np.uint8), size, off)


def _exact(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Step and zero point of each group, where all of them are multiples of one step bit by bit, at most 15 of them apart."""
    groups, size, columns = blocks.shape
    flat = np.moveaxis(blocks, 1, 2).reshape(-1, size)
    few = flat[:: max(1, len(flat) // 64)]
    found = _steps(few) and _steps(flat)  # most weights are on no grid, and that is seen at once
    if found is None:
        return None
    scale, zero = found
    return scale.reshape(groups, columns), zero.reshape(groups, columns)


def _steps(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    largest = np.abs(rows).max(1)
    scale, zero = np.ones(len(rows), np.float32), np.zeros(len(rows))
    open_ = largest > 0
    for places in _candidates():
        at = np.flatnonzero(open_)
        if not len(at):
            return scale, zero
        near = order_of((largest[at] / np.float32(places[0])).astype(np.float32)) + places[1]
        step = number_of(near)
        with np.errstate(all="ignore"):
            levels = np.rint(rows[at] / step[:, None])
            low, high = np.minimum(levels.min(1), 0), np.maximum(levels.max(1), 0)
            fits = (step > 0) & (high - low < _LEVELS) & (levels.astype(np.float32) * step[:, None] == rows[at]).all(1)
        scale[at[fits]], zero[at[fits]], open_[at[fits]] = step[fits], -low[fits], False
    return None if open_.any() else (scale, zero)


def _candidates() -> Iterable[tuple[int, int]]:
    """At which level the largest number of a group may lie, and by how many float32 the step may be off the quotient."""
    return [(level, off) for level in range(1, _LEVELS) for off in (0, 1, -1, 2, -2)]


def _rounded(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Step and zero point of each group that are off the least, of some."""
    low, high = np.minimum(blocks.min(1), 0), np.maximum(blocks.max(1), 0)
    best = np.full(low.shape, np.inf)
    scale, zero = np.ones(low.shape, np.float32), np.zeros(low.shape)
    for share in _SHRUNK:
        step = ((high - low) * share / (_LEVELS - 1)).astype(np.float32)
        step = np.where(step > 0, step, np.float32(1))
        for at in (np.rint(-low * share / step), np.rint(-low * share / step) + 1):
            middle = np.clip(at, 0, _LEVELS - 1)
            levels = np.clip(np.rint(blocks / step[:, None]) + middle[:, None], 0, _LEVELS - 1)
            off = ((((levels - middle[:, None]) * step[:, None]) - blocks) ** 2).sum(1)
            better = off < best
            best, scale, zero = np.where(better, off, best), np.where(better, step, scale), np.where(better, middle, zero)
    return scale, zero
