"""A form of the gradient of MaxPool for providers that do not give the places of its maxima: WebGPU claims the second output, and fails when it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from exporter.runtime.claims import claim
from exporter.runtime.facts import ShapeAndType, fact_of, find_facts
from symbolics.graph.emitter import Emitter
from symbolics.graph.values import attr, made_by
from symbolics.graph.walk import walk

__all__ = ["maxima_by_windows"]

_FLOAT = ir.DataType.FLOAT
_MOST_KERNEL = 64  # positions


def maxima_by_windows(model: ir.Model) -> int:
    """Gradients of MaxPool by what each window sees, found by one Conv whose kernels have a single one, and sent back by its transpose.

    Each window's element goes to the first of its maxima, as onnxruntime's CPU counts them. An infinity in a window makes NaN of it.

    Returns:
        How many gradients were written so.
    """
    facts: dict[ir.Value, ShapeAndType] = {}
    if any(node.op_type.startswith("MaxPoolGrad") for node in walk(model.graph)):
        find_facts(model, facts)

    def claimed(op: Emitter, node: ir.Node, _: object) -> list[ir.Value] | None:
        made = _form(op, node, facts)
        return None if made is None else [made]

    count = claim(model, {"MaxPoolGrad": claimed})
    for node in walk(model.graph):
        if node.op_type == "MaxPool" and len(node.outputs) == 2 and not (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
            node.resize_outputs(1)
    return count


def _form(op: Emitter, node: ir.Node, facts: Mapping[ir.Value, ShapeAndType]) -> ir.Value | None:
    g, indices = [*node.inputs, None, None][:2]
    pool = made_by(indices, "MaxPool")
    if pool is None or g is None or pool.inputs[0] is None or len(pool.outputs) < 2 or indices is not pool.outputs[1]:
        return None
    x, y = pool.inputs[0], pool.outputs[0]
    (shape, kind), outs = fact_of(x, facts), fact_of(g, facts)[0]
    kernel = list(attr(pool, "kernel_shape"))
    n, count = len(kernel), math.prod(kernel)
    if shape is None or outs is None or len(shape) != n + 2 or len(outs) != n + 2 or n > 2 or count > _MOST_KERNEL or kind is not _FLOAT:
        return None
    sizes, ends = ([size for size in each[2:] if isinstance(size, int)] for each in (shape, outs))
    if len(sizes) < n or len(ends) < n:
        return None
    strides, dilations = ([*(attr(pool, name, None) or [1] * n)] for name in ("strides", "dilations"))
    before = [*(attr(pool, "pads", None) or [0] * n)][:n]
    if not len(strides) == len(dilations) == len(before) == n or min(*strides, *dilations, *kernel) < 1:
        return None
    if (auto := attr(pool, "auto_pad", "NOTSET")) not in ("NOTSET", ""):
        reach = [(out - 1) * s + (k - 1) * d + 1 - size for out, s, k, d, size in zip(ends, strides, kernel, dilations, sizes, strict=True)]
        before = [0 if auto == "VALID" else max(each + (auto == "SAME_LOWER"), 0) // 2 for each in reach]
    if n == 1:  # as one row
        kernel, sizes, ends, strides, dilations, before = (
            [1, *kernel],
            [1, *sizes],
            [1, *ends],
            [1, *strides],
            [1, *dilations],
            [0, *before],
        )
    # How far the last window reaches behind the image; negative where it leaves places out.
    after = [
        (out - 1) * s + (k - 1) * d + 1 - size - b
        for out, s, k, d, size, b in zip(ends, strides, kernel, dilations, sizes, before, strict=True)
    ]
    pads = [*before, *(max(each, 0) for each in after)]
    slides = {"strides": strides, "dilations": dilations, "pads": pads, "kernel_shape": kernel}
    kernels = op.constant(np.eye(count).reshape(count, 1, *kernel), _FLOAT)
    one, planes = op.i64([-1, 1, *ends]), op.i64([-1, 1, *sizes])
    seen = op.Conv(op.Reshape(x, planes), kernels, **slides)
    found = op.Cast(op.Equal(seen, op.Reshape(y, one)), to=_FLOAT)
    if any(pads):
        found = op.Mul(found, op.constant(_inside(sizes, ends, kernel, strides, dilations, before), _FLOAT))
    first = op.Equal(op.CumSum(found, op.i64(1)), op.constant(1, _FLOAT))
    sent = op.Mul(op.Mul(found, op.Cast(first, to=_FLOAT)), op.Reshape(g, one))
    left = [max(-each, 0) for each in after]
    back = op.ConvTranspose(sent, kernels, output_padding=left if any(left) else None, **slides)
    whole = [-1, shape[1], *shape[2:]] if isinstance(shape[1], int) else op.Shape(x)
    made: ir.Value = op.Reshape(back, op.i64(whole) if isinstance(whole, list) else whole)
    return made


def _inside(
    sizes: list[int], ends: list[int], kernel: list[int], strides: list[int], dilations: list[int], before: list[int]
) -> np.ndarray:
    """(1, positions of the kernel, *windows): 1 where a position of a window is one of the image."""
    masks = []
    for size, out, k, s, d, b in zip(sizes, ends, kernel, strides, dilations, before, strict=True):
        place = np.arange(out)[None] * s + np.arange(k)[:, None] * d - b  # (position, window)
        masks.append((place >= 0) & (place < size))
    rows, columns = masks
    both = rows[:, None, :, None] & columns[None, :, None, :]
    return both.reshape(1, -1, *ends).astype(np.float32)
