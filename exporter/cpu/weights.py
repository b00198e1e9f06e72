"""Gradients of convolutions for their weights, by the native library, where the processor has AVX-512.

As standard operators they are products that read each place of an image for every position of the kernel, which something has to lay out
in memory. The native library lays out what a task needs in the caches (native/convolution.c).
"""

from __future__ import annotations

import onnx_ir as ir

from exporter.cpu.operators import DOMAIN, has_wide_vectors
from exporter.runtime.accelerate import CONV_WEIGHT_GRAD
from exporter.runtime.moved import slide_of
from exporter.runtime.views import View
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
    slide = slide_of(rows, columns) if has_wide_vectors() else None
    if slide is None:
        return None
    kernel, strides, dilations = slide.kernel, slide.strides, slide.dilations
    moves = zip((kernel, strides, dilations), (_MOST_KERNEL, _MOST_STRIDE, _MOST_DILATION))
    if any(not 0 < number <= most for numbers, most in moves for number in numbers):
        return None
    results, channels, sizes = slide.outs[1] or 0, slide.images[1] or 0, [size or 0 for size in slide.outs[2:]]
    if results < _FEW_RESULTS or sizes[0] * sizes[1] < _FEW_PLACES or sizes[1] > _MOST_WIDE:
        return None
    made: ir.Value = op.node(
        CONV_WEIGHT_GRAD, [slide.large, slide.small], domain=DOMAIN,
        kernel=kernel, strides=strides, dilations=dilations, starts=slide.starts,
        images=[-1 if dim is None else dim for dim in slide.images], gradients=[-1 if dim is None else dim for dim in slide.outs],
    )  # fmt: skip
    made.type = ir.TensorType(ir.DataType.FLOAT)
    made.shape = ir.Shape([results * channels, kernel[0] * kernel[1]])
    return made
