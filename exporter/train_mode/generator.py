"""The numbers of a graph that are drawn from a seed (`exporter.train_mode.masks`), as nodes: of one seed every runtime makes the same ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from exporter.train_mode.masks import DIGITS, LANES, WIDTH, bits, first_keys, keys, keys_of_pass, table, units
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope

__all__ = ["Generator"]

_F32 = ir.DataType.FLOAT


class Generator:
    """Writes what is drawn in a graph. What all draws share stands in front of the graph.

    Attributes:
        op: Has the nodes for the front of the graph.
    """

    def __init__(self, scope: Scope, seed: ir.Value, count: int) -> None:
        """Make the keys of ``count`` draws, of the int64 scalar ``seed``."""
        self.op = op = Emitter(scope)
        first = op.constant(first_keys(count), _F32)
        self._keys = _split(op, keys(op, first, _digits(op, seed, DIGITS)), count)
        self._tables: dict[tuple[int, int], tuple[ir.Value, list[ir.Value]]] = {}

    def draw(self, op: Emitter, number: int, passes: Sequence[ir.Value], dims: Sequence[int] | None, like: ir.Value | None) -> ir.Value:
        """Draw one number for each element of a tensor.

        Args:
            op: Gets the nodes that draw.
            number: Of the draw, from 0 on: other numbers draw other values.
            passes: The numbers of the passes through the bodies around it, the outermost first.
            dims, like: The shape; where it is not known, a tensor of it.

        Returns:
            float32, flat: multiples of 2**-18 in [0, 1), each as likely as the others.
        """
        key = self._keys[number]
        for count in passes:
            key = keys_of_pass(op, key, _digits(op, count, DIGITS[:2]))
        size = None if dims is None else math.prod(dims)
        if size is None:
            rows, columns = _numbers(op, op.Div(op.Add(op.Size(like), WIDTH - 1), WIDTH))
        else:
            grid = max(-(-size // WIDTH), 1), min(size, WIDTH)
            if grid not in self._tables:
                self._tables[grid] = _numbers(self.op, *grid)
            rows, columns = self._tables[grid]
        keyed = op.Add(rows, op.Reshape(key, [LANES, 1, 1]))
        drawn: ir.Value = bits(op, _lanes(op, keyed), columns)
        if size is None or (size > WIDTH and size % WIDTH):
            drawn = op.Slice(op.Reshape(drawn, [-1]), [0], op.Reshape(op.Size(like), [1]) if size is None else [size])
        return drawn

    @staticmethod
    def shaped(op: Emitter, drawn: ir.Value, dims: Sequence[int] | None, like: ir.Value | None) -> ir.Value:
        """What was drawn, or what was made of it, in the shape of its tensor."""
        shape, zeros = (op.Shape(like), 1) if dims is None else (list(dims), 1 if 0 in dims else None)  # a 0 in it is no axis to copy
        found: ir.Value = op.Reshape(drawn, shape, allowzero=zeros)
        return found


def _digits(op: Emitter, number: ir.Value, digits: Sequence[int]) -> list[ir.Value]:
    """The digits of an int64 scalar, as `exporter.train_mode.masks` counts them."""
    found = op.Cast(op.BitwiseAnd(number, list(digits)), to=_F32)
    return _split(op, op.Mul(found, units(digits)), len(digits))


def _numbers(op: Emitter, rows: ir.Value | int, columns: int = WIDTH) -> tuple[ir.Value, list[ir.Value]]:
    """The numbers of so many rows, of shape [4, rows, 1], and of columns, each of shape [1, columns]."""
    limit = op.constant(rows + WIDTH, _F32) if isinstance(rows, int) else op.Cast(op.Add(rows, WIDTH), to=_F32)
    found = table(op, op.Unsqueeze(op.Range(op.constant(0, _F32), limit, op.constant(1, _F32)), [0]))
    across = op.Slice(found, [0], [columns], [1])
    down = op.Slice(found, [WIDTH], [2**31 - 1], [1])
    return op.Unsqueeze(down, [2]), _lanes(op, op.Unsqueeze(across, [1]))


def _lanes(op: Emitter, numbers: ir.Value) -> list[ir.Value]:
    """The four parts of a tensor along its first axis, without it."""
    return [op.Squeeze(part, [0]) for part in _split(op, numbers, LANES)]


def _split(op: Emitter, value: ir.Value, count: int) -> list[ir.Value]:
    """The parts of a tensor along its first axis, one element of it each."""
    return [value] if count == 1 else list(op.Split(value, [1] * count, axis=0, outputs=count))
