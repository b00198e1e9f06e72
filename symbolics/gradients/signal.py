"""DFT, STFT."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.gradients.registry import composite, gradient
from symbolics.graph.builder import Builder
from symbolics.graph.values import attr

__all__: list[str] = []


def _dft(op: Builder, x: ir.Value, length: ir.Value | None, axis: int | ir.Value, **attributes: int) -> ir.Value:
    """DFT; its axis was an attribute before opset 20."""
    if op.scope.opset >= 20:
        return op.DFT(x, length, op.i64(axis) if isinstance(axis, int) else axis, **attributes)
    return op.DFT(x, length, axis=axis, **attributes)


def _axis(op: Builder, node: ir.Node, rank: int) -> int | ir.Value:
    if "axis" in node.attributes:
        return attr(node, "axis") % rank
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return (-2 if op.scope.opset >= 20 else 1) % rank
    known = op.const(node.inputs[2])
    return node.inputs[2] if known is None else int(known.reshape(())) % rank


def _dim(op: Builder, x: ir.Value, axis: int | ir.Value) -> ir.Value:
    """The dim of an axis that may be known only at run time, as a vector."""
    return op.vector([op.dim(x, axis)]) if isinstance(axis, int) else op.Gather(op.shape(x), op.Reshape(axis, [1]), axis=0)


def _scalar(op: Builder, v: ir.Value) -> ir.Value:
    return op.Reshape(v, op.constant([], ir.DataType.INT64))


@gradient("DFT")
def dft(op, node, g):
    """The adjoint of a DFT over n points is the inverse DFT times n; of the inverse, the DFT over n.

    A one-sided spectrum is filled with zeros; an input that was cut or filled to n points is filled or cut again, one
    that was real takes the real part.
    """
    x, length = [*node.inputs, None][:2]
    none = [None] * (len(node.inputs) - 1)
    rank, inverse, onesided = op.rank(node, x), attr(node, "inverse", 0), attr(node, "onesided", 0)
    axis = _axis(op, node, rank)
    if inverse and onesided:
        return [_dft_real(op, node, g, axis, length), *none]
    points = op.Reshape(length, [1]) if length is not None else _dim(op, x if onesided else node.outputs[0], axis)
    n = op.Cast(_scalar(op, points), to=g.dtype)
    h = _dft(op, g, _scalar(op, points), axis, inverse=1 - inverse)
    h = h / n if inverse else h * n
    if length is not None:
        axes = [axis] if isinstance(axis, int) else op.Reshape(axis, [1])
        h = op.Pad(h, op.Concat([0], op.Sub(_dim(op, x, axis), points), axis=0), None, axes)
    return [h if x.shape[rank - 1] == 2 else op.Slice(h, [0], op.vector([op.dim(x, rank - 1)]), [rank - 1]), *none]


def _dft_real(op: Builder, node: ir.Node, g: ir.Value, axis: int | ir.Value, length: ir.Value | None) -> ir.Value:
    """Of the inverse from a one-sided spectrum to n real points: (DFT of g) / n, twice where a bin stands for two."""
    x = node.inputs[0]
    half = _dft(op, g, length, axis, onesided=1)
    points, size = _dim(op, node.outputs[0], axis), _dim(op, x, axis)
    n = op.Cast(_scalar(op, points), to=g.dtype)
    bins = op.Range(op.i64(0), _scalar(op, size), op.i64(1))
    alone = op.Or(op.Equal(bins, 0), op.Equal(op.Mul(bins, op.i64(2)), _scalar(op, points)))
    weight = op.Where(alone, op.number(1.0, g), op.number(2.0, g)) / n
    here = op.Equal(op.i64(list(range(len(x.shape)))), op.i64(axis) if isinstance(axis, int) else axis)
    return half * op.Reshape(weight, op.Where(here, op.i64(-1), op.i64(1)))


@composite("STFT")
def stft(op, node):
    """Frames, times the window, through DFT."""
    signal, step, window, length = [*node.inputs, None, None][:4]
    rank = op.rank(node, signal)
    x = op.Unsqueeze(signal, [2]) if rank == 2 else signal
    size = op.Reshape(length, [1]) if length is not None else op.Shape(window)
    step = op.Reshape(step, [1])
    one = op.i64([1])
    count = op.Add(op.Div(op.Sub(op.Shape(x, start=1, end=2), size), step), one)
    begin = op.Mul(op.Range(op.i64(0), _scalar(op, count), op.i64(1)), step)
    within = op.Range(op.i64(0), _scalar(op, size), op.i64(1))
    frames = op.Gather(x, op.Add(op.Unsqueeze(begin, [1]), op.Unsqueeze(within, [0])), axis=1)
    frames.type, frames.shape = signal.type, ir.Shape([None, None, None, signal.shape[2] if rank == 3 else 1])
    if window is not None:
        frames = frames * op.Unsqueeze(window, [1])
    return [_dft(op, frames, None, 2, onesided=attr(node, "onesided", 1))]
