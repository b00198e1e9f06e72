"""The zeros that a BatchNormalization reads in the place of running statistics, and writes over, as one node of the native library.

exporter/train_mode/batch_norm.py gives each of them zeros of its own, which no optimizer may know: nine operators, of which each takes
5 to 20 us, where a BatchNormalization of 512 x 256 takes 70.
"""

from __future__ import annotations

import onnx_ir as ir

from exporter.cpu.elementwise import ELEMENTWISE, FUNCTIONS
from exporter.cpu.operators import DOMAIN
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import attr, made_by, trains
from symbolics.graph.walk import sweep
from symbolics.quirks import copied

__all__ = ["zeros_at_once"]

_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE}
_GREATER = FUNCTIONS["Greater"]
_MAKERS = frozenset("Cast CastLike Constant IsNaN Less Reshape Slice Where".split())


def zeros_at_once(model: ir.Model) -> int:
    """Let each BatchNormalization that trains read zeros of one node, where it reads such zeros.

    Args:
        model: Changed. Its nodes stand in the order of their values.

    Returns:
        How many nodes were put in.
    """
    graph = model.graph
    nodes = [node for node in graph if node.op_type == "BatchNormalization" and trains(node)]
    if not nodes:
        return 0
    scope, made = Scope(free_prefix(graph, "statistics/"), lambda value: False), 0
    for node in nodes:
        buffers = [_buffer(value) for value in node.inputs[3:5]]
        mean, var = buffers if len(buffers) == 2 else (None, None)
        if mean is None or var is None or mean.dtype is not var.dtype or attr(node, "momentum") != 0:
            continue
        op = Emitter(scope)
        # A number is never greater than itself. Places are the two inputs, then the two outputs.
        program = [number for place in range(2) for number in (_GREATER, 2 + place, place, place)]
        zeros = op.node(ELEMENTWISE, [mean, var], domain=DOMAIN, outputs=2, program=program, full=0)
        for place, (zero, buffer) in enumerate(zip(zeros, (mean, var), strict=True)):
            zero.type, zero.shape = ir.TensorType(buffer.dtype or ir.DataType.FLOAT), buffer.shape
            node.replace_input_with(3 + place, zero)
        graph.insert_before(node, op.nodes)
        made += 1
    if made:
        graph.opset_imports[DOMAIN] = 1
        sweep(graph, _MAKERS)
    return made


def _buffer(value: ir.Value | None) -> ir.Value | None:
    """The buffer from which `batch_statistics` makes zeros: no number is less than itself. None for any other value."""
    cast = made_by(copied(value), "CastLike") or made_by(copied(value), "Cast")
    less = None if cast is None else made_by(cast.inputs[0], "Less")
    buffer, other = less.inputs if less is not None and len(less.inputs) == 2 else (None, None)
    is_its_own = buffer is not None and buffer is other and buffer.dtype in _FLOATS and value is not None and value.dtype is buffer.dtype
    return buffer if is_its_own else None
