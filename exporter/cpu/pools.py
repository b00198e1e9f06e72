"""Pools that say where their maxima are, and their gradients, by the native library.

onnxruntime's MaxPool with indices asks at each place of a window whether it is inside of the image, and ScatterElements, which takes a gradient
there in the body of MaxPoolGrad, runs in one thread. The native library does the same, bit for bit, in vectors and plane by plane
(native/pools.c). A pool whose indices nobody reads is left alone: onnxruntime has a quick kernel for that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from exporter.cpu.declared import forget
from exporter.cpu.operators import DOMAIN
from exporter.runtime.facts import ShapeAndType, fact_of, fixed_shape
from symbolics.graph.emitter import Emitter
from symbolics.graph.values import attr

__all__ = ["MAX_POOL_GRAD", "MAX_POOL_INDICES", "max_pool_grad", "pool_at_once"]

MAX_POOL_INDICES, MAX_POOL_GRAD = "MaxPoolIndices", "MaxPoolGrad"

_MOST = 2**15  # of a kernel, stride or dilation: MOST_POOL in native/pools.c
_FEW_ELEMENTS = 2**12  # of fewer, onnxruntime's MaxPool costs less than to call another one
_MOST_DIMS = 16  # as DIMS_MOST in native/elementwise.c


def pool_at_once(model: ir.Model, facts: dict[ir.Value, ShapeAndType]) -> int:
    """Replace what is written above in a model for onnxruntime's CPU with the native library.

    Args:
        model: Changed. Its nodes stand in the order of their values.
        facts: Shapes and element types of values that do not say it themselves; grows by those of what is put in. The shapes may be wrong: the
            native library works from those of what it reads.

    Returns:
        How many nodes were put in.
    """
    graph = model.graph
    made = 0
    for node in list(graph):
        if node.domain != "":
            continue
        if node.op_type == "MaxPool" and (window := _window(node, facts)) is not None:
            node.domain, node.op_type = DOMAIN, MAX_POOL_INDICES
            node.attributes.clear()
            node.attributes.update({name: ir.AttrInt64s(name, numbers) for name, numbers in window.items()})
            for value, kind in zip(node.outputs, (ir.DataType.FLOAT, ir.DataType.INT64), strict=True):
                _describe(value, (fact_of(value, facts)[0], kind), facts)
            made += 1
    if made:
        graph.opset_imports[DOMAIN] = 1
    return made


def _describe(value: ir.Value, known: ShapeAndType, facts: dict[ir.Value, ShapeAndType]) -> None:
    """Say of what the native library makes its element type alone: onnxruntime would believe the shape, which so far it has derived itself."""
    facts[value] = known
    value.type = None if known[1] is None else ir.TensorType(known[1])
    forget([value])


def _window(node: ir.Node, facts: dict[ir.Value, ShapeAndType]) -> dict[str, list[int]] | None:
    """What a MaxPool's windows are, where the native library computes it; None for any other, and where nobody reads the indices."""
    x = node.inputs[0] if len(node.inputs) == 1 else None
    if x is None or fact_of(x, facts)[1] is not ir.DataType.FLOAT or len(node.outputs) != 2 or not all(o.name for o in node.outputs):
        return None
    if not (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        return None
    if math.prod(fixed_shape(x, facts) or [_FEW_ELEMENTS]) < _FEW_ELEMENTS:
        return None
    if attr(node, "auto_pad") not in ("NOTSET", b"NOTSET") or attr(node, "ceil_mode") or attr(node, "storage_order"):
        return None
    names = {"kernel": "kernel_shape", "strides": "strides", "dilations": "dilations", "pads": "pads"}
    defaults = {"strides": (1, 1), "dilations": (1, 1), "pads": (0, 0, 0, 0)}
    found = {name: attr(node, said, defaults.get(name)) for name, said in names.items()}
    if not all(isinstance(numbers, (list, tuple)) and all(isinstance(i, int) for i in numbers) for numbers in found.values()):
        return None
    window = {name: list(numbers) for name, numbers in found.items()}
    pads = window.pop("pads")
    if any(len(numbers) != 2 or not all(0 < i <= _MOST for i in numbers) for numbers in window.values()) or len(pads) != 4:
        return None
    return window | {"pads": pads} if all(0 <= pad < size for pad, size in zip(pads, window["kernel"] * 2, strict=True)) else None


def max_pool_grad(op: Emitter, node: ir.Node, facts: Mapping[ir.Value, ShapeAndType]) -> list[ir.Value] | None:
    """What stands for a call of MaxPoolGrad; None where the native library does not compute it.

    Args:
        op: Takes the node.
        node: The call.
        facts: Shapes and types of values.
    """
    g, indices, shape = node.inputs if len(node.inputs) == 3 else (None, None, None)
    adds = attr(node, "adds")
    if g is None or indices is None or shape is None or not isinstance(adds, (list, tuple)) or tuple(adds) not in ((0,), (1,)):
        return None
    rank = fixed_shape(shape, facts)
    if rank is None or len(rank) != 1 or not 0 < rank[0] <= _MOST_DIMS:
        return None
    if [fact_of(value, facts)[1] for value in (g, indices, shape)] != [ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.INT64]:
        return None
    made: ir.Value = op.node(MAX_POOL_GRAD, [g, indices, op.ReduceProd(shape, keepdims=1), shape], domain=DOMAIN, adds=list(adds))
    made.type = ir.TensorType(ir.DataType.FLOAT)  # and no shape: onnxruntime would believe what the file says of it
    return [made]
