"""Resize: linear in x and separable, so one matrix per axis."""

from __future__ import annotations

from fractions import Fraction

import onnx_ir as ir
from onnx_ir import Value

from symbolics.gradients.registry import Ints, gradient
from symbolics.gradients.windows import Dim
from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, static_shape

__all__: list[str] = []

_REPEATS = (("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"))  # with these a whole factor repeats each element
_OF_LENGTHS = ("align_corners", "tf_crop_and_resize")  # with these the lengths say all, and not the scale


@gradient("Resize", "Upsample")
def resize(
    op: Builder, g: Value, x: Value, *, y: Value, node: ir.Node, axes: Ints, mode: str, antialias: int | None,
    coordinate_transformation_mode: str | None, nearest_mode: str | None, keep_aspect_ratio_policy: str | None,
) -> Value:  # fmt: skip
    """dx = M^T g along each axis that changes; M is the same Resize of the identity matrix."""
    rank, stretches = op.rank(node, x), keep_aspect_ratio_policy in ("stretch", None)
    roi, scales = [*node.inputs[1:], None][:2] if node.op_type == "Resize" else (None, node.inputs[1])
    known = op.const(scales)
    factors = None if known is None or not known.size else [float(s) for s in known.reshape(-1)]
    if mode == "nearest" and (coordinate_transformation_mode, nearest_mode) in _REPEATS and not antialias:
        if (repeats := _repeats(factors, axes, static_shape(x), static_shape(y) if stretches else None)) is not None:
            return _sum_blocks(op, g, x, repeats)
    crops = coordinate_transformation_mode == "tf_crop_and_resize"
    places = [a % rank for a in axes or range(rank)]
    for position, axis in enumerate(places):
        d, out = op.dim(x, axis), None if y.shape is None else y.shape[axis]
        if crops or (factors[position] != 1.0 if factors else not stretches or not isinstance(d, int) or d != out):
            part = _part(op, roi, position, len(places)) if crops and roi is not None else None
            has_scales = scales is not None and (known is None or known.size)
            factor = op.Slice(scales, [position], [position + 1]) if has_scales else None
            one_for_all = not stretches and not has_scales and coordinate_transformation_mode not in _OF_LENGTHS
            if one_for_all and (others := _deciding(op, node, x, places, position)):
                matrix = _kept_matrix(op, node, x, axis, position, others)
            else:
                matrix = _matrix(op, node, x, y, axis, part, factor)
            g = _along(op, g, axis, rank, matrix)
    g.shape = x.shape
    return g


def _repeats(factors: list[float] | None, axes: Ints, x: tuple[int, ...] | None, y: tuple[int, ...] | None) -> list[int] | None:
    """How often a nearest Resize repeats each element along each axis: the common case of upsampling."""
    if 0 in (x or ()) or (factors is not None and axes is not None):
        return None
    if factors is None:
        factors = None if x is None or y is None else [b / a for a, b in zip(x, y)]
    return None if factors is None or any(f < 1 or f != int(f) for f in factors) else [int(f) for f in factors]


def _sum_blocks(op: Builder, g: Value, x: Value, factors: list[int]) -> Value:
    split: list[Dim] = []
    blocks = []
    for i, f in enumerate(factors):
        split.append(op.dim(x, i))
        if f > 1:
            blocks.append(len(split))
            split.append(f)
    return op.ReduceSum(op.Reshape(g, split), blocks, keepdims=0) if blocks else g


def _matrix(op: Builder, node: ir.Node, x: Value, y: Value, axis: int, part: Value | None, factor: Value | None) -> Value:
    """(out, in): the Resize of this axis applied to the identity matrix, as the height of an image."""
    size = op.dim(x, axis)
    eye = op.EyeLike(op.ConstantOfShape(op.vector([size, size])), dtype=ir.DataType.FLOAT)
    image = op.Unsqueeze(eye, [0, 1])
    attributes = {k: v for k, v in node.attributes.items() if k not in ("axes", "keep_aspect_ratio_policy", "extrapolation_value")}
    if factor is not None:
        inputs = [op.Concat(op.constant([1.0, 1.0], ir.DataType.FLOAT), factor, op.constant([1.0], ir.DataType.FLOAT), axis=0), None]
    else:
        inputs = [None, op.Concat([1, 1], op.vector([op.dim(y, axis)]), op.vector([size]), axis=0)]
    return op.Cast(op.Squeeze(op.Resize(image, part, *inputs, **attributes), [0, 1]), to=x.dtype)


def _deciding(op: Builder, node: ir.Node, x: Value, places: list[int], position: int) -> list[tuple[Dim, Dim]]:
    """The other axes, as lengths and sizes, that this axis needs beside it to find the one scale that keep_aspect_ratio_policy makes of all.

    Where all is known that is one axis, as short as its ratio allows; none where this axis is the one itself.
    """
    sizes, lengths = op.ints(node.inputs[3]), [op.dim(x, axis) for axis in places]
    known = [n for n in lengths if isinstance(n, int)]
    if sizes is None or len(known) < len(lengths) or 0 in known:
        return [(n, op.Slice(node.inputs[3], [i], [i + 1]) if sizes is None else sizes[i]) for i, n in enumerate(lengths) if i != position]
    ratios = [Fraction(size, n) for size, n in zip(sizes, known)]
    scale = (min if attr(node, "keep_aspect_ratio_policy") == "not_larger" else max)(ratios)
    return [] if ratios[position] == scale else [(scale.denominator, scale.numerator)]


def _kept_matrix(op: Builder, node: ir.Node, x: Value, axis: int, position: int, others: list[tuple[Dim, Dim]]) -> Value:
    """`_matrix` where the scale is that of other axes, along which the image is constant: one image for each element of this axis."""
    length, sizes = op.dim(x, axis), op.ints(node.inputs[3])
    size: Dim = op.Slice(node.inputs[3], [position], [position + 1]) if sizes is None else sizes[position]
    eye = op.EyeLike(op.ConstantOfShape(op.vector([length, length])), dtype=ir.DataType.FLOAT)
    behind = list(range(3, 3 + len(others)))
    images = op.Expand(op.Unsqueeze(eye, [1, *behind]), op.vector([1, 1, 1, *[n for n, _ in others]]))
    attributes = {k: v for k, v in node.attributes.items() if k not in ("axes", "extrapolation_value")}
    resized = op.Resize(images, None, None, op.vector([size, *[s for _, s in others]]), axes=[2, *behind], **attributes)
    first = op.Slice(resized, [0] * len(others), [1] * len(others), behind)
    return op.Cast(op.Transpose(op.Squeeze(first, [1, *behind]), perm=[1, 0]), to=x.dtype)


def _part(op: Builder, roi: Value, position: int, count: int) -> Value:
    """The region of interest of one axis, for `_matrix`."""
    zeros, ones = op.constant([0.0, 0.0], ir.DataType.FLOAT), op.constant([1.0, 1.0], ir.DataType.FLOAT)
    zero, one = op.constant([0.0], ir.DataType.FLOAT), op.constant([1.0], ir.DataType.FLOAT)
    begin, end = (op.Cast(op.Slice(roi, [i], [i + 1]), to=ir.DataType.FLOAT) for i in (position, position + count))
    return op.Concat(zeros, begin, zero, ones, end, one, axis=0)


def _along(op: Builder, g: Value, axis: int, rank: int, matrix: Value) -> Value:
    """matrix^T along one axis of g."""
    if axis == rank - 2:
        return op.MatMul(op.Transpose(matrix, perm=[1, 0]), g)
    return op.move_last(op.MatMul(op.move_last(g, axis, rank), matrix), axis, rank)
