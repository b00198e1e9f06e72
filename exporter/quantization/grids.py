"""Uniform grids: where the levels of a quantiser lie, found from what it computes and not from how it is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

__all__ = [
    "TOLERATED_FLOATS",
    "TOLERATED_SHARE",
    "Grid",
    "WeightGrid",
    "find_grid",
    "finer",
    "fit_weight",
    "number_of",
    "order_of",
    "thresholds",
]

_LEVELS = 256
# Threshold beside QuantizeLinear's: two float32, as where ties go the other way; or this share of a step, which is what a division and an addition come to
# that are rounded to float32 at level 255, as where the zero point is added before anything is rounded.
TOLERATED_FLOATS, TOLERATED_SHARE = 2, 2.0**-15
_FAR = np.float32(2.0**40)


@dataclass(frozen=True)
class Grid:
    """Levels ``scale * (q - zero)`` for q from ``low`` to ``high``, as uint8 holds them.

    Attributes:
        scale: The step, in float32.
        zero: The level of 0.0, 0 to 255.
        low, high: The first and the last level.
        floats: By how many float32 numbers the threshold between two levels is away from QuantizeLinear's, at most.
        moved: How many thresholds are not QuantizeLinear's own.
    """

    scale: np.float32
    zero: int
    low: int
    high: int
    floats: int = 0
    moved: int = 0

    @property
    def values(self) -> np.ndarray:
        """What the levels stand for, in float32."""
        return ((np.arange(self.low, self.high + 1) - self.zero).astype(np.float32) * self.scale).astype(np.float32)


@dataclass(frozen=True)
class WeightGrid:
    """A weight on a grid: ``levels * scale`` is the weight, bit by bit, but for a zero point.

    Attributes:
        levels: int8, or uint8 with a zero point.
        scale: One step, or one a channel, in float32.
        zero: The level of 0.0: other than 0 for a whole tensor alone.
        axis: The axis of the channels, None where the scale is one.
    """

    levels: np.ndarray
    scale: np.ndarray
    zero: int
    axis: int | None


# ------------------------------------------------------------------------------------------------------------ activations
def find_grid(function: Callable[[np.ndarray], np.ndarray], scales: Iterable[np.ndarray]) -> Grid | str:
    """The grid that a function rounds numbers to, proven by its thresholds; or why it is no quantiser that integer kernels know.

    The function is looked at far out, then densely between its ends, then at each threshold, which bisection finds to the last bit.

    Args:
        function: float32 numbers -> float32 numbers, each by itself.
        scales: Constants that it is made of; one of them may be the exact step.
    """
    wide = np.float32(2.0) ** np.arange(-100, 41, 0.25, dtype=np.float32)
    rough = function(np.concatenate([-wide[::-1], np.zeros(1, np.float32), wide]))
    low, high = function(np.array([-_FAR, _FAR], np.float32))
    if not np.isfinite(rough).all() or rough.min() != low or rough.max() != high:
        return "it has no last level: nothing cuts it off"
    if not low < high:
        return "it gives one number for every other"
    margin = (high - low) * np.float32(0.01)
    dense = np.linspace(low - margin, high + margin, 1 << 14, dtype=np.float32)
    rounded = function(dense)
    levels = np.unique(rounded + np.float32(0.0))  # -0.0 is 0.0
    if len(levels) > _LEVELS:
        return f"it has {'more than ' if len(levels) > 5000 else ''}{min(len(levels), 5000)} levels: integer kernels take 8 bits"
    if len(levels) < 2:
        return "it has one level"
    step = (float(high) - float(low)) / (len(levels) - 1)
    if np.abs(np.diff(levels.astype(np.float64)) - step).max() > 1e-3 * step:
        return "its levels are not evenly spaced"
    zero = -float(low) / step
    if abs(zero - round(zero)) > 1e-2:
        return f"0.0 is not one of its levels, but at {zero % 1:.2f} between two: an integer zero point cannot say it"
    if np.abs(rounded - np.clip(dense, low, high)).max() > 0.51 * step:
        return "it does not round to the nearest level"
    places = np.arange(len(levels)) - round(zero)
    scale = _exact(levels, places, step, scales)
    if scale is None:
        return "its levels are not whole multiples of a float32"
    zero_point = max(0, -int(places[0]))
    first = zero_point + int(places[0])
    last = first + len(levels) - 1
    if not (0 <= zero_point <= 255 and last <= 255):
        return "its levels are too far from 0.0 for 8 bits"

    def as_written(x: np.ndarray) -> np.ndarray:
        level = np.clip(np.rint(x / scale).astype(np.float32) + np.float32(zero_point), first, last)
        return (level - np.float32(zero_point)) * scale

    ours, theirs = (thresholds(each, levels) for each in (function, as_written))
    apart = np.abs(ours - theirs)
    if apart.max() > TOLERATED_FLOATS and np.abs(number_of(ours) - number_of(theirs)).max() > TOLERATED_SHARE * step:
        return f"its thresholds are up to {apart.max()} float32 numbers away from QuantizeLinear's"
    return Grid(scale, zero_point, first, last, int(apart.max()), int((apart > 0).sum()))


def _exact(levels: np.ndarray, places: np.ndarray, step: float, scales: Iterable[np.ndarray]) -> np.float32 | None:
    """The float32 whose multiples the levels are: exactly, or to one float32 of rounding, or as near as sums of such multiples come in float32."""
    numbers = [float(array.item()) for array in scales if array.size == 1]
    inverses = [float(np.float32(1.0) / np.float32(number)) for number in numbers if number and math.isfinite(number)]
    known = [np.float32(number) for number in (*numbers, *inverses) if abs(number - step) < 1e-3 * step]
    near = np.float32(step)
    around = (order_of(near) + np.arange(-16, 17)).astype(np.int64)
    found: tuple[float, np.float32] | None = None
    for scale in (*known, near, *number_of(around)):
        multiples = (places.astype(np.float32) * scale).astype(np.float32)
        floats = int(np.abs(order_of(multiples) - order_of(levels)).max())
        if floats == 0:
            return scale
        off = float(np.abs(multiples.astype(np.float64) - levels).max())
        if (floats == 1 or off <= TOLERATED_SHARE * step) and (found is None or off < found[0]):
            found = off, scale
    return None if found is None else found[1]


def thresholds(function: Callable[[np.ndarray], np.ndarray], levels: np.ndarray) -> np.ndarray:
    """The last float32 that is rounded to each level but the last, by its place among all."""
    below, above = order_of(levels[:-1]), order_of(levels[1:])
    middle = (levels[:-1] + levels[1:]) / 2
    while (wide := above - below > 1).any():
        half = np.where(wide, (below + above) // 2, below)
        under = function(number_of(half)) < middle
        below, above = np.where(wide & under, half, below), np.where(wide & ~under, half, above)
    return below


def order_of(x: np.ndarray | np.float32) -> np.ndarray:
    """float32 numbers as integers in the same order, neighbours one apart."""
    bits = np.atleast_1d(np.asarray(x, np.float32) + np.float32(0.0)).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def number_of(order: np.ndarray) -> np.ndarray:
    """What `order_of` gives, back."""
    bits = np.where(order < 0, -order + 0x80000000, order)
    return bits.astype(np.uint32).view(np.float32)


# ---------------------------------------------------------------------------------------------------------------- weights
def fit_weight(weight: np.ndarray, axis: int | None, scales: Iterable[np.ndarray]) -> WeightGrid | str:
    """A weight as integers, where it is on a grid bit by bit; or why not.

    Args:
        weight: The weight, in float32, as the model multiplies by it.
        axis: The axis whose channels may have steps of their own, None: one step.
        scales: Constants that the weight is made of; one of them may be the exact step, or the steps.
    """
    if not np.isfinite(weight).all():
        return "its weight is not finite"
    channels = weight.shape[axis] if axis is not None else 1
    rows = np.moveaxis(weight, axis, 0).reshape(channels, -1) if axis is not None else weight.reshape(1, -1)
    for array in scales:
        for known in (array, 1.0 / np.where(array == 0, np.float32(1), array)):
            step = known.astype(np.float32).reshape(-1, 1)
            if step.size in (1, channels) and (step > 0).all() and (levels := _levels_of(rows, step)) is not None:
                return _packed(weight, levels, step, axis)
    steps = [_fitted(row) for row in rows]
    if any(step is None for step in steps):
        if _between(weight):
            return "its weight has 0.0 in the middle between two levels, as DoReFa's has: integers need a level there"
        return (
            f"its weight is on no uniform grid{'' if axis is None else f' ({sum(step is None for step in steps)} of {channels} channels)'}"
        )
    step = np.array(steps, np.float32).reshape(-1, 1)
    levels = _levels_of(rows, step)
    return "its weight is on no uniform grid of 8 bits" if levels is None else _packed(weight, levels, step, axis)


def finer(weight: WeightGrid) -> WeightGrid:
    """The same weight in steps that are smaller by a power of two, as far as int8 goes: exactly the same numbers, and a bias in finer steps."""
    most = int(np.abs(weight.levels.astype(np.int64)).max())
    if weight.zero or not 0 < most < 64:
        return weight
    factor = 1 << (127 // most).bit_length() - 1
    scale = (weight.scale / np.float32(factor)).astype(np.float32)
    if not np.array_equal(scale * np.float32(factor), weight.scale):
        return weight
    return WeightGrid((weight.levels.astype(np.int64) * factor).astype(np.int8), scale, 0, weight.axis)


def _levels_of(rows: np.ndarray, step: np.ndarray) -> np.ndarray | None:
    """The levels, None where the rows are not multiples of the step bit by bit, or more than 8 bits wide."""
    with np.errstate(over="ignore", invalid="ignore"):
        levels = np.rint(rows / step)
    if not (np.abs(levels) <= 255).all() or not np.array_equal(levels * step, rows):
        return None
    return levels.astype(np.int64) if max(levels.max(), 0) - min(levels.min(), 0) <= 255 else None


def _fitted(row: np.ndarray) -> np.float32 | None:
    """The largest step whose multiples a row is, bit by bit."""
    values = np.unique(np.abs(row)).astype(np.float64)
    values = values[values > 0]
    if not len(values):
        return np.float32(1)
    for chosen in (values[:: -(-len(values) // 16)], values) if len(values) <= _LEVELS else ():  # a few say it, mostly
        step = _common_divisor(chosen)
        if step * _LEVELS < values[-1]:
            continue
        levels = np.rint(row / step)
        step = float((levels * row.astype(np.float64)).sum() / (levels.astype(np.float64) ** 2).sum())
        near = number_of(order_of(np.float32(step)) + np.arange(-8, 9))
        found = next((np.float32(each) for each in near if np.array_equal(levels.astype(np.float32) * each, row)), None)
        if found is not None:
            return found
    return None


def _common_divisor(values: np.ndarray) -> float:
    """Euclid's algorithm for floats: what is a twentieth of a level of 8 bits or less is a rounding error."""
    least = float(values[-1]) / 255 * 0.05
    found = float(values[0])
    for i, value in enumerate(values):
        one, rest = found, float(value)
        while rest > least:
            one, rest = rest, abs(one - rest * round(one / rest))
        found = one
        if found * 2 * _LEVELS < values[-1]:  # it only gets smaller, and is too small already
            return 0.0
        for known in values[: i + 1]:  # each larger one says it more exactly
            count = round(known / found)
            if not count:  # what is left is no divisor of what came before
                return 0.0
            found = float(known) / count
    return found


def _between(weight: np.ndarray) -> bool:
    """Whether the levels of a weight are evenly spaced, and 0.0 in the middle between two of them."""
    values = np.unique(weight).astype(np.float64)
    gaps = np.diff(values)
    step = gaps[gaps > 1e-3 * gaps.max()].min() if gaps.any() else 0.0  # one level may have come out in two float32
    return bool(step) and bool((np.abs(np.abs(values / step) % 1 - 0.5) < 0.02).all())


def _packed(weight: np.ndarray, levels: np.ndarray, step: np.ndarray, axis: int | None) -> WeightGrid | str:
    low, high = int(min(levels.min(), 0)), int(max(levels.max(), 0))
    if axis is not None:
        shape = np.moveaxis(weight, axis, 0).shape
        levels = np.moveaxis(levels.reshape(shape), 0, axis)
    levels = levels.reshape(weight.shape)
    whole = axis if step.size > 1 else None
    scale = step.reshape(-1) if step.size > 1 else step.reshape(())
    if low >= -128 and high <= 127:
        return WeightGrid(levels.astype(np.int8), scale, 0, whole)
    if step.size > 1:
        return f"its weight goes from {low} to {high} steps: with steps of its own, a channel takes -128 to 127"
    return WeightGrid((levels - low).astype(np.uint8), scale, -low, whole)
