"""Resize: linear in x and separable, so one matrix an axis."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.gradients.registry import gradient
from symbolics.graph.builder import Builder
from symbolics.graph.values import attr, static_shape

__all__: list[str] = []


@gradient("Resize", "Upsample")
def resize(op, node, g):
    """dx = M^T g along each axis that changes; M is the same Resize of the identity matrix."""
    x = node.inputs[0]
    rank = op.rank(node, x)
    none = [None] * (len(node.inputs) - 1)
    axes = [a % rank for a in attr(node, "axes") or range(rank)]
    if (factors := _repeats(op, node)) is not None:
        return [_sum_blocks(op, g, x, factors), *none]
    for position, axis in enumerate(axes):
        if not _is_kept(op, node, position, axis):
            g = _along(op, g, axis, rank, _matrix(op, node, position, axis, len(axes)))
    g.shape = x.shape
    return [g, *none]


def _repeats(op: Builder, node: ir.Node) -> list[int] | None:
    """The factors of a nearest Resize that repeats each element: the common case of upsampling."""
    how = (attr(node, "coordinate_transformation_mode", "half_pixel"), attr(node, "nearest_mode", "round_prefer_floor"))
    usual = how in (("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"), ("half_pixel", "floor"))
    x, y = static_shape(node.inputs[0]), static_shape(node.outputs[0])
    if (
        node.op_type == "Upsample"
        or attr(node, "mode", "nearest") != "nearest"
        or not usual
        or attr(node, "antialias", 0)
        or 0 in (x or ())
    ):
        return None
    scales = op.const(node.inputs[2]) if len(node.inputs) > 2 else None
    if scales is not None and scales.size:
        if attr(node, "axes") is not None:
            return None
        factors = [float(s) for s in scales.reshape(-1)]
    elif x is not None and y is not None and attr(node, "keep_aspect_ratio_policy", "stretch") == "stretch":
        factors = [b / a for a, b in zip(x, y)]
    else:
        return None
    if how == ("half_pixel", "floor") or any(f < 1 or f != int(f) for f in factors):
        return None
    return [int(f) for f in factors]


def _sum_blocks(op: Builder, g: ir.Value, x: ir.Value, factors: list[int]) -> ir.Value:
    split: list[int | ir.Value] = []
    blocks = []
    for i, f in enumerate(factors):
        split.append(op.dim(x, i))
        if f > 1:
            blocks.append(len(split))
            split.append(f)
    return op.ReduceSum(op.reshape(g, split), blocks, keepdims=0) if blocks else g


def _is_kept(op: Builder, node: ir.Node, position: int, axis: int) -> bool:
    """Whether an axis stays as it is."""
    if attr(node, "coordinate_transformation_mode") == "tf_crop_and_resize":
        return False
    scales = op.const(node.inputs[2]) if len(node.inputs) > 2 else op.const(node.inputs[1]) if node.op_type == "Upsample" else None
    if scales is not None and scales.size:
        return float(scales[position]) == 1.0
    x, y = node.inputs[0].shape[axis], None if node.outputs[0].shape is None else node.outputs[0].shape[axis]
    return type(x) is int and x == y and attr(node, "keep_aspect_ratio_policy", "stretch") == "stretch"


def _matrix(op: Builder, node: ir.Node, position: int, axis: int, count: int) -> ir.Value:
    """(out, in): the Resize of this axis applied to the identity matrix, as the height of an image."""
    x, y = node.inputs[0], node.outputs[0]
    roi, scales, _sizes = [*node.inputs[1:], None, None, None][:3] if node.op_type == "Resize" else (None, node.inputs[1], None)
    size = op.dim(x, axis)
    single = op.vector([size])
    eye = op.EyeLike(op.ConstantOfShape(op.vector([size, size])), dtype=ir.DataType.FLOAT)
    image = op.Unsqueeze(eye, [0, 1])
    attributes = {k: v for k, v in node.attributes.items() if k not in ("axes", "keep_aspect_ratio_policy", "extrapolation_value")}
    known = op.const(scales)
    if scales is not None and (known is None or known.size):
        one = op.constant([1.0, 1.0], ir.DataType.FLOAT)
        inputs = [op.Concat(one, op.Slice(scales, [position], [position + 1]), op.constant([1.0], ir.DataType.FLOAT), axis=0), None]
    else:
        inputs = [None, op.Concat([1, 1], op.vector([op.dim(y, axis)]), single, axis=0)]
    part = None
    if roi is not None and attr(node, "coordinate_transformation_mode") == "tf_crop_and_resize":
        zeros, ones = op.constant([0.0, 0.0], ir.DataType.FLOAT), op.constant([1.0, 1.0], ir.DataType.FLOAT)
        zero, one = op.constant([0.0], ir.DataType.FLOAT), op.constant([1.0], ir.DataType.FLOAT)
        begin, end = (op.Cast(op.Slice(roi, [i], [i + 1]), to=ir.DataType.FLOAT) for i in (position, position + count))
        part = op.Concat(zeros, begin, zero, ones, end, one, axis=0)
    out = op.Resize(image, part, *inputs, **attributes)
    return op.cast(op.Squeeze(out, [0, 1]), x.dtype)


def _along(op: Builder, g: ir.Value, axis: int, rank: int, matrix: ir.Value) -> ir.Value:
    """matrix^T along one axis of g."""
    if axis == rank - 2:
        return op.MatMul(op.Transpose(matrix, perm=[1, 0]), g)
    return op.move_last(op.MatMul(op.move_last(g, axis, rank), matrix), axis, rank)
