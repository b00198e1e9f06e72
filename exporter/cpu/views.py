"""What operators that only move elements make of a tensor, said at once: where each element of the result lies in it.

An element of the result has an index along each axis. Its coordinate along a dim of the tensor is a start and the sum of steps times indices;
outside of the tensor it is zero. Transpose, Reshape, Slice, Pad with zeros, and Gather and Concat at regular places keep that form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

__all__ = ["FAR", "Axis", "View", "in_turn"]


#: No size, start or step is more, as in native/rearrange.c: what a file says is no size of a tensor then.
FAR = 2**40


@dataclass(frozen=True)
class Axis:
    """An index.

    Attributes:
        size: How many there are; None: as many as the tensor has along its open dim.
        steps: By how much the coordinate along each dim moves from one to the next.
    """

    size: int | None
    steps: tuple[int, ...]

    def split(self, inner: int) -> tuple[Axis, Axis]:
        """The same as two axes, of which the inner one has so many."""
        assert self.size is not None
        return Axis(self.size // inner, tuple(step * inner for step in self.steps)), Axis(inner, self.steps)


@dataclass(frozen=True)
class View:
    """See above. Each method gives None where the result is not of that form.

    Attributes:
        source: The tensor.
        dims: Its shape; None for one that is open.
        starts: The coordinates of the first element.
        groups: The axes of each dim of the result, the outer ones first; none for a dim of one element.
        moves: How many operators have moved elements.
    """

    source: ir.Value
    dims: tuple[int | None, ...]
    starts: tuple[int, ...]
    groups: tuple[tuple[Axis, ...], ...]
    moves: int = 0

    @classmethod
    def of(cls, source: ir.Value, dims: tuple[int | None, ...]) -> View:
        """The tensor itself."""
        axes = [Axis(dim, tuple(int(i == k) for k in range(len(dims)))) for i, dim in enumerate(dims)]
        return cls(source, dims, (0,) * len(dims), tuple((axis,) if axis.size != 1 else () for axis in axes))

    @property
    def shape(self) -> list[int | None]:
        """Of the result; None for a dim with an open axis."""
        return [None if any(axis.size is None for axis in group) else math.prod(axis.size or 1 for axis in group) for group in self.groups]

    @property
    def is_straight(self) -> bool:
        """Whether the tensor is read one element after the other."""
        axes = self.axes()
        return not axes or (not any(axes[-1].steps[:-1]) and abs(axes[-1].steps[-1]) == 1)

    def transposed(self, perm: Sequence[int]) -> View | None:
        """Transpose."""
        if sorted(perm) != list(range(len(self.groups))):
            return None
        return replace(self, groups=tuple(self.groups[axis] for axis in perm), moves=self.moves + (list(perm) != sorted(perm)))

    def reshaped(self, shape: Sequence[int]) -> View | None:
        """Reshape with allowzero=0."""
        if any(size == 0 and place >= len(self.groups) for place, size in enumerate(shape)) or list(shape).count(-1) > 1:
            return None
        own = self.shape
        wanted = [own[place] if size == 0 else size for place, size in enumerate(shape)]  # None: the open axis alone
        rest = [axis for group in self.groups for axis in group]
        if -1 in wanted and (None in wanted or None not in own):
            known, total = (math.prod(size for size in sizes if size is not None and size != -1) for sizes in (wanted, own))
            if not known or total % known:
                return None
            wanted[wanted.index(-1)] = total // known
        groups: list[tuple[Axis, ...]] = []
        cut = wanted.index(-1) if -1 in wanted else len(wanted)
        for size in wanted[:cut]:
            found = _take(rest, size)
            if found is None:
                return None
            groups.append(found)
        behind: list[tuple[Axis, ...]] = []
        for size in reversed(wanted[cut + 1 :]):
            found = _take(rest, size, last=True)
            if found is None:
                return None
            behind.insert(0, found)
        if cut == len(wanted):
            return replace(self, groups=tuple(groups)) if not rest else None
        return replace(self, groups=(*groups, tuple(rest), *behind))

    def padded(self, before: Sequence[int], after: Sequence[int]) -> View | None:
        """Pad with zeros: of dims that are a whole dim of the tensor, so that what lies outside of them lies outside of it."""
        starts, groups = list(self.starts), list(self.groups)
        if len(before) != len(groups) or len(after) != len(groups) or not all(0 <= amount < FAR for amount in (*before, *after)):
            return None
        axes = [axis for group in self.groups for axis in group]
        for place, (first, last) in enumerate(zip(before, after, strict=True)):
            if not first and not last:
                continue
            if len(groups[place]) != 1:
                return None
            (axis,) = groups[place]
            along = [dim for dim, step in enumerate(axis.steps) if step]
            if len(along) != 1 or axis.size is None:
                return None
            (dim,) = along
            step = axis.steps[dim]
            begin = self.starts[dim] if step > 0 else self.starts[dim] - (axis.size - 1)
            if abs(step) != 1 or begin or axis.size != self.dims[dim] or any(other.steps[dim] for other in axes if other is not axis):
                return None
            starts[dim] -= step * first
            groups[place] = (Axis(axis.size + first + last, axis.steps),)
        return replace(self, starts=tuple(starts), groups=tuple(groups), moves=self.moves + 1)

    def picked(self, axis: int, indices: np.ndarray) -> View | None:
        """Gather along an axis, of a number or a vector of them, or a Slice: at places that follow one another regularly."""
        group = self.groups[axis]
        sizes = [a.size for a in group if a.size is not None]
        length = math.prod(sizes)
        flat = indices.ravel()
        if len(sizes) != len(group) or length >= FAR or indices.ndim > 1 or not flat.size or flat.min() < -length or flat.max() >= length:
            return None
        places = np.stack(np.unravel_index(flat % length, sizes), axis=-1) if sizes else np.zeros((flat.size, 0), np.int64)
        coordinates = places @ np.array([a.steps for a in group], np.int64).reshape(len(group), len(self.dims))
        found = in_turn(coordinates)
        if found is None:
            return None
        starts = tuple(int(start + first) for start, first in zip(self.starts, coordinates[0], strict=True))
        groups = [*self.groups[:axis], *([found] if indices.ndim else []), *self.groups[axis + 1 :]]
        return replace(self, starts=starts, groups=tuple(groups), moves=self.moves + 1)

    def at(self, axis: int, index: int) -> View:
        """One index of an outermost axis of a group, which is gone then."""
        outer, *inner = self.groups[axis]
        starts = tuple(start + index * step for start, step in zip(self.starts, outer.steps, strict=True))
        return replace(self, starts=starts, groups=(*self.groups[:axis], tuple(inner), *self.groups[axis + 1 :]))

    @staticmethod
    def joined(views: Sequence[View], axis: int) -> View | None:
        """Concat of views of one tensor that differ in where they begin."""
        first = views[0]
        if any((view.source, view.dims, view.groups) != (first.source, first.dims, first.groups) for view in views):
            return None
        found = in_turn(np.array([view.starts for view in views], np.int64))
        if found is None:
            return None
        groups = [*first.groups[:axis], (*found, *first.groups[axis]), *first.groups[axis + 1 :]]
        return replace(first, groups=tuple(groups), moves=sum(view.moves for view in views) + 1)

    def axes(self) -> list[Axis]:
        """The indices of the result, as few as say the same."""
        found: list[Axis] = []
        for axis in (axis for group in self.groups for axis in group if axis.size != 1):
            last = found[-1] if found else None
            if last is not None and last.size is not None and axis.size is not None:
                if last.steps == tuple(step * axis.size for step in axis.steps):
                    found[-1] = Axis(last.size * axis.size, axis.steps)
                    continue
            found.append(axis)
        return found


def in_turn(coordinates: np.ndarray) -> tuple[Axis, ...] | None:
    """Axes along which coordinates (places, dims) follow one another; None where they are not regular."""
    axes: list[Axis] = []
    rest = coordinates
    while len(rest) > 1:
        moves = np.diff(rest, axis=0)
        others = np.flatnonzero((moves != moves[0]).any(axis=1))
        size = int(others[0]) + 1 if len(others) else len(rest)
        if len(rest) % size or size == 1:
            return None
        axes.insert(0, Axis(size, tuple(int(step) for step in moves[0])))
        rest = rest[::size]
    if not axes:
        return ()
    indices = np.indices([axis.size or 1 for axis in axes]).reshape(len(axes), -1)
    said = indices.T @ np.array([axis.steps for axis in axes], np.int64) + coordinates[0]
    return tuple(axes) if np.array_equal(said, coordinates) else None


def _take(rest: list[Axis], size: int | None, *, last: bool = False) -> tuple[Axis, ...] | None:
    """The first axes or the last ones, so many elements of them; None for `size`: the open one alone."""
    end = -1 if last else 0
    if size is None:
        return (rest.pop(end),) if rest and rest[end].size is None else None
    found: list[Axis] = []
    while size > 1:
        if not rest or (own := rest[end].size) is None:
            return None
        if size % own == 0:
            found.append(rest.pop(end))
            size //= own
        elif own % size == 0:
            outer, inner = rest[end].split(size if last else own // size)
            taken, rest[end] = (inner, outer) if last else (outer, inner)
            found.append(taken)
            size = 1
        else:
            return None
    return tuple(found[::-1] if last else found) if size == 1 else None
