"""Random numbers of a training step or a loaded module from its seed, as dropout's masks are: ONNX's operators draw from the runtime's own generator.

Without it a step that is repeated draws others, and so does a training that goes on from a saved state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from exporter.train_mode.generator import Generator
from symbolics.graph.emitter import Emitter
from symbolics.graph.values import attr, static_shape

__all__ = ["DRAWS", "draws_without_a_seed", "random_numbers"]

#: How many draws of 18 bits one node takes at most.
DRAWS = 3

_UNIFORM, _NORMAL = ("RandomUniform", "RandomUniformLike"), ("RandomNormal", "RandomNormalLike")

#: Significant bits of a type: so many, less one, are drawn, and half a step is added. So no number is 0 or 1, also not after rounding to the type.
_BITS = {ir.DataType.FLOAT16: 11, ir.DataType.BFLOAT16: 8}


def draws_without_a_seed(node: ir.Node) -> bool:
    """Whether a node draws from the runtime's generator: uniform or normal numbers, or classes; one with a ``seed`` of its own keeps it."""
    return not node.domain and node.op_type in (*_UNIFORM, *_NORMAL, "Multinomial") and "seed" not in node.attributes


def random_numbers(generator: Generator, op: Emitter, node: ir.Node, passes: Sequence[ir.Value], number: int) -> ir.Value:
    """What a node draws, from the seed: uniform numbers of 23 bits, normal ones by the form of Box and Muller (1958), or classes by uniform numbers.

    Args:
        generator: Draws.
        op: Gets the nodes.
        node: Draws without a seed.
        passes: The numbers of the passes through the bodies around it.
        number: The first of its draws; it may take `DRAWS`.
    """
    if node.op_type == "Multinomial":
        return _classes(generator, op, node, passes, number)
    like = node.inputs[0] if node.inputs else None
    dims = static_shape(like) if like is not None else [int(size) for size in attr(node, "shape")]
    kind = ir.DataType(attr(node, "dtype", 0)) or (like.dtype if like is not None else None) or ir.DataType.FLOAT
    u = _uniform(generator, op, number, passes, dims, like)
    if node.op_type in _UNIFORM:
        if kind in _BITS:
            step = 2.0 ** (1 - _BITS[kind])
            u = op.Add(op.Mul(op.Floor(op.Mul(u, 1 / step)), step), step / 2)
        first, last = attr(node, "low", 0.0), attr(node, "high", 1.0)
        found = u if (first, last) == (0.0, 1.0) else op.Add(op.Mul(u, last - first), first)
    else:
        turn = op.Mul(generator.draw(op, number + 2, passes, dims, like), 2 * math.pi)
        normal = op.Mul(op.Sqrt(op.Mul(op.Log(u), -2.0)), op.Cos(turn))
        mean, scale = attr(node, "mean", 0.0), attr(node, "scale", 1.0)
        found = normal if (mean, scale) == (0.0, 1.0) else op.Add(op.Mul(normal, scale), mean)
    found = generator.shaped(op, found, dims, like)
    if kind is not ir.DataType.FLOAT:
        found = op.Cast(found, to=kind)
    found.shape = node.outputs[0].shape
    return found


def _uniform(
    generator: Generator, op: Emitter, number: int, passes: Sequence[ir.Value], dims: Sequence[int] | None, like: ir.Value | None
) -> ir.Value:
    """Numbers of 23 bits between 0 and 1, flat; it takes two draws."""
    high, low = (generator.draw(op, number + place, passes, dims, like) for place in (0, 1))
    found: ir.Value = op.Add(op.Add(high, op.Mul(op.Floor(op.Mul(low, 32.0)), 2.0**-23)), 2.0**-24)
    return found


def _classes(generator: Generator, op: Emitter, node: ir.Node, passes: Sequence[ir.Value], number: int) -> ir.Value:
    """Classes by their log-probabilities, one row of draws for each row: how many sums of the first probabilities a uniform number has passed."""
    chances, count = node.inputs[0], attr(node, "sample_size", 1)
    assert chances is not None
    sums = op.CumSum(op.Softmax(op.Cast(chances, to=ir.DataType.FLOAT), axis=-1), op.i64(-1))
    whole = op.Expand(op.Slice(sums, [-1], [2**31 - 1], [1]), [1, count])
    rows = static_shape(chances)
    dims = None if rows is None else [rows[0], count]
    u = generator.shaped(op, _uniform(generator, op, number, passes, dims, whole), dims, whole)
    passed = op.LessOrEqual(op.Unsqueeze(sums, [1]), op.Unsqueeze(op.Mul(u, whole), [2]))
    numbers = op.ReduceSum(op.Cast(passed, to=ir.DataType.FLOAT), [2], keepdims=0)  # in float: some providers add no integers
    found: ir.Value = op.Cast(numbers, to=ir.DataType(attr(node, "dtype", ir.DataType.INT32)))
    found.shape = node.outputs[0].shape
    return found
