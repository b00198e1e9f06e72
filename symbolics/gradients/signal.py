"""DFT, STFT."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir import Value

from symbolics.gradients.registry import composite, gradient
from symbolics.graph.builder import Builder
from symbolics.graph.spectra import spectrum
from symbolics.graph.values import static_shape

__all__: list[str] = []


def _axis(op: Builder, axis: Value | int | None, rank: int) -> int | Value:
    if axis is None:
        return (-2 if op.scope.opset >= 20 else 1) % rank
    if isinstance(axis, int):
        return axis % rank
    known = op.ints(axis)
    return axis if known is None else known[0] % rank


def _dim(op: Builder, x: Value, axis: int | Value) -> Value:
    """The dim of an axis that may be known only at run time, as a vector."""
    return op.vector([op.dim(x, axis)]) if isinstance(axis, int) else op.Gather(op.Shape(x), op.Reshape(axis, [1]), axis=0)


def _scalar(op: Builder, v: Value) -> Value:
    return op.Reshape(v, op.constant([], ir.DataType.INT64))


@gradient("DFT")
def dft(
    op: Builder, g: Value, x: Value, length: Value | None, axes: Value | None, *,
    y: Value, node: ir.Node, axis: int | None, inverse: int, onesided: int,
) -> Value:  # fmt: skip
    """The adjoint of a DFT over n points is the inverse DFT times n; of the inverse, the DFT over n.

    A one-sided spectrum is filled with zeros; an input that was cut or filled to n points is filled or cut again, one
    that was real takes the real part.
    """
    rank = op.rank(node, x)
    place = _axis(op, axes if op.scope.opset >= 20 else axis, rank)
    if inverse and onesided:
        return _dft_real(op, g, x, y, length, place, rank)
    points = op.Reshape(length, [1]) if length is not None else _dim(op, x if onesided else y, place)
    n = op.Cast(_scalar(op, points), to=g.dtype)
    h = spectrum(op, g, _scalar(op, points), place, inverse=1 - inverse)
    h = h / n if inverse else h * n
    if length is not None:
        h = _filled(op, h, op.Sub(_dim(op, x, place), points), place, rank)
    parts = op.dim(x, rank - 1)
    return h if parts == 2 else op.Slice(h, [0], op.vector([parts]), [rank - 1])


def _filled(op: Builder, x: Value, more: Value, axis: int | Value, rank: int) -> Value:
    """So many zeros behind the end of an axis; a negative number cuts it."""
    if op.ints(more) == [0]:
        return x
    if isinstance(axis, int):
        return op.padded(x, [0], [more], [axis], rank)
    return op.Pad(x, op.Concat([0], more, axis=0), None, op.Reshape(axis, [1]))


def _dft_real(op: Builder, g: Value, x: Value, y: Value, length: Value | None, axis: int | Value, rank: int) -> Value:
    """Of the inverse from a one-sided spectrum to n real points: (DFT of g) / n, twice where a bin stands for two."""
    points, size = _dim(op, y, axis), _dim(op, x, axis)
    half = spectrum(op, g, length, axis, onesided=1)
    half = _filled(op, half, op.Sub(size, op.Add(op.Div(points, op.i64(2)), op.i64(1))), axis, rank)
    n = op.Cast(_scalar(op, points), to=g.dtype)
    bins = op.Range(op.i64(0), _scalar(op, size), op.i64(1))
    alone = op.Or(op.Equal(bins, 0), op.Equal(op.Mul(bins, op.i64(2)), _scalar(op, points)))
    weight = op.Where(alone, op.number(1.0, g), op.number(2.0, g)) / n
    here = op.Equal(op.i64(list(range(rank))), op.i64(axis) if isinstance(axis, int) else axis)
    return half * op.Reshape(weight, op.Where(here, op.i64(-1), op.i64(1)))


@composite("STFT")
def stft(op: Builder, signal: Value, step: Value, window: Value | None, length: Value | None, *, node: ir.Node, onesided: int) -> Value:
    """Frames, times the window, through DFT."""
    rank = op.rank(node, signal)
    x = op.Unsqueeze(signal, [2]) if rank == 2 else signal
    size = op.Reshape(length, [1]) if length is not None else op.Shape(window)
    step = op.Reshape(step, [1])
    one = op.i64([1])
    count = op.Add(op.Div(op.Sub(op.Shape(x, start=1, end=2), size), step), one)
    begin = op.Mul(op.Range(op.i64(0), _scalar(op, count), op.i64(1)), step)
    within = op.Range(op.i64(0), _scalar(op, size), op.i64(1))
    frames = op.Gather(x, op.Add(op.Unsqueeze(begin, [1]), op.Unsqueeze(within, [0])), axis=1)
    known: Sequence[int | None] = op.ints(length) or static_shape(window) or [None]
    frames.type, frames.shape = signal.type, ir.Shape([None, None, known[0], *(signal.shape or [1, 1])[2:], *[1] * (3 - rank)])
    if window is not None:
        frames = frames * op.Unsqueeze(window, [1])
    return spectrum(op, frames, None, 2, onesided=onesided)
