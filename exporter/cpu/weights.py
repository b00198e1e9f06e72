"""Gradients of convolutions for their weights, by the native library, where the processor has AVX-512.

As standard operators they are products that read each place of an image for every position of the kernel, which something has to lay out
in memory. The native library lays out what a task needs in the caches (native/convolution.c).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from exporter.cpu.operators import DOMAIN, has_wide_vectors
from exporter.cpu.views import Axis, View
from exporter.runtime.accelerate import CONV_WEIGHT_GRAD
from symbolics.graph.emitter import Emitter

__all__ = ["conv_weight_grad"]

_MOST_KERNEL, _MOST_STRIDE, _MOST_DILATION = 64, 16, 64  # no more than in native/convolution.c
_MOST_WIDE = 512  # windows of a row: longer ones fill the caches
_FEW_RESULTS = 16  # of the 32 that are computed at once
_FEW_PLACES = 64  # of an image: of fewer, what begins and ends a row of windows is most of it


def conv_weight_grad(op: Emitter, rows: View | None, columns: View) -> ir.Value | None:
    """The gradient for weights (results * channels, kernel positions); None where it is not that of a Conv of two axes and one group.

    Args:
        op: Takes the node.
        rows: The gradients (results, windows) of a tensor (N, results, OH, OW).
        columns: What the windows see (channels, kernel positions, windows) of a tensor (N, channels, H, W).
    """
    if (
        rows is None
        or len(rows.dims) != 4
        or len(columns.dims) != 4
        or any(rows.starts)
        or any(columns.starts[:2])
        or not has_wide_vectors()
    ):
        return None
    images, results, *outs = rows.dims
    channels = columns.dims[1]
    image, result, down, across = View.of(rows.source, rows.dims).groups
    if rows.groups != (result, (*image, *down, *across)) or images != columns.dims[0]:
        return None
    _, positions, windows = columns.groups
    kernel, dilations = _along_each(positions)
    sizes, strides = _along_each(axis for axis in windows if not axis.steps[0])
    channel = View.of(columns.source, columns.dims).groups[1]
    said = (channel, _grid(kernel, dilations), (*image, *_grid(sizes, strides)))
    if sizes != outs or columns.groups != said or results is None or channels is None:
        return None
    moves = zip((kernel, strides, dilations), (_MOST_KERNEL, _MOST_STRIDE, _MOST_DILATION))
    if any(not 0 < number <= most for numbers, most in moves for number in numbers):
        return None
    if results < _FEW_RESULTS or sizes[0] * sizes[1] < _FEW_PLACES or sizes[1] > _MOST_WIDE:
        return None
    made: ir.Value = op.node(
        CONV_WEIGHT_GRAD, [columns.source, rows.source], domain=DOMAIN,
        kernel=kernel, strides=strides, dilations=dilations, starts=list(columns.starts[2:]),
        images=[-1 if dim is None else dim for dim in columns.dims], gradients=[-1 if dim is None else dim for dim in rows.dims],
    )  # fmt: skip
    made.type = ir.TensorType(ir.DataType.FLOAT)
    made.shape = ir.Shape([results * channels, kernel[0] * kernel[1]])
    return made


def _grid(sizes: Sequence[int], steps: Sequence[int]) -> tuple[Axis, ...]:
    """The indices of places of an image."""
    (down, across), (high, wide) = steps, sizes
    return tuple(axis for axis in (Axis(high, (0, 0, down, 0)), Axis(wide, (0, 0, 0, across))) if axis.size != 1)


def _along_each(axes: Iterable[Axis]) -> tuple[list[int], list[int]]:
    """How many places there are down and across an image, and by how much they move; 1 where no index moves along it."""
    sizes, steps = [1, 1], [1, 1]
    for axis in axes:
        for i in range(2):
            if axis.steps[2 + i]:
                sizes[i], steps[i] = axis.size or 0, axis.steps[2 + i]
    return sizes, steps
