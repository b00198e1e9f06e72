"""Pools that say where their maxima are, and their gradients, by the native library.

onnxruntime's MaxPool with indices asks at each place of a window whether it is inside of the image, and ScatterElements, with which
`Builder.scatter_numbers` takes a gradient there, runs in one thread. The native library does the same, bit for bit, in vectors and plane by plane
(native/pools.c). A pool whose indices nobody reads is left alone: onnxruntime has a quick kernel for that.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from exporter.cpu.declared import forget
from exporter.cpu.operators import DOMAIN
from exporter.runtime.facts import ShapeAndType, fact_of, fixed_shape
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import attr, fixed_array, made_by
from symbolics.graph.walk import remove_operators

__all__ = ["MAX_POOL_GRAD", "MAX_POOL_INDICES", "pool_at_once"]

MAX_POOL_INDICES, MAX_POOL_GRAD = "MaxPoolIndices", "MaxPoolGrad"

_MOST = 2**15  # of a kernel, stride or dilation: MOST_POOL in native/pools.c
_FEW_ELEMENTS = 2**12  # of fewer, onnxruntime's MaxPool costs less than to call another one
_MOST_DIMS = 16  # as DIMS_MOST in native/elementwise.c
_READ_BY_GRADIENTS = frozenset({"ScatterElements", "ConstantOfShape", "Reshape", "Size"})


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
    if all(node.op_type not in ("MaxPool", "ScatterElements") for node in graph):
        return 0
    scope = Scope(free_prefix(graph, "pooled/"), lambda value: False)
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
        elif node.op_type == "Reshape" and (found := _scattered(node, facts)) is not None:
            op, (read, adds), (shape, _) = Emitter(scope), found, fact_of(node.outputs[0], facts)
            value = op.node(MAX_POOL_GRAD, read, domain=DOMAIN, adds=[adds])
            replace(scope, node, op.nodes, [value])
            _describe(value, (shape, ir.DataType.FLOAT), facts)
            made += 1
    if made:
        graph.opset_imports[DOMAIN] = 1
        remove_operators(graph, _READ_BY_GRADIENTS)
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


def _scattered(node: ir.Node, facts: dict[ir.Value, ShapeAndType]) -> tuple[list[ir.Value], int] | None:
    """The gradient, the indices, the size and the shape that a Reshape, with what stands before it, scatters into zeros, and whether it adds."""
    source, shape = node.inputs if len(node.inputs) == 2 else (None, None)
    scatter = made_by(source, "ScatterElements")
    if source is None or shape is None or scatter is None or len(scatter.inputs) != 3:
        return None
    if len(source.uses()) != 1 or source.is_graph_output():
        return None
    data, indices, updates = scatter.inputs
    zeros, places, g = made_by(data, "ConstantOfShape"), _before_flat(indices), _before_flat(updates)
    adds = attr(scatter, "reduction", "none")
    if zeros is None or places is None or g is None or attr(scatter, "axis") != 0 or adds not in ("none", "add", b"none", b"add"):
        return None
    size, dims = zeros.inputs[0] if len(zeros.inputs) == 1 else None, fixed_array(shape)
    if size is None or not _is_zero(zeros):
        return None
    if (fact_of(g, facts)[1], fact_of(places, facts)[1]) != (ir.DataType.FLOAT, ir.DataType.INT64):
        return None
    if dims is None and not attr(node, "allowzero"):  # a 0 would stand for a dim of what is reshaped
        return None
    if dims is not None and (dims.ndim != 1 or dims.size > _MOST_DIMS or not ((dims > 0) | (dims == -1)).all()):
        return None
    return [g, places, size, shape], int(adds in ("add", b"add"))


def _before_flat(value: ir.Value | None) -> ir.Value | None:
    """What a Reshape makes a vector of; None where none does."""
    reshape = made_by(value, "Reshape")
    shape = fixed_array(reshape.inputs[1]) if reshape is not None and len(reshape.inputs) == 2 else None
    return reshape.inputs[0] if reshape is not None and shape is not None and shape.shape == (1,) and shape[0] else None


def _is_zero(node: ir.Node) -> bool:
    """Whether a ConstantOfShape makes zeros of float32."""
    value = attr(node, "value", None)
    array = np.zeros(1, np.float32) if value is None else value.numpy()
    return array.dtype == np.float32 and array.size == 1 and not array.tobytes().strip(b"\0")
