"""PythonOps that stand in no file: put into a model in memory, where Python computes something better than onnxruntime does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from symbolics.graph.emitter import Emitter
from symbolics.node.attributes import ir_attributes, write_attributes
from symbolics.node.call import AutogradCall
from symbolics.node.containers import Slot
from symbolics.node.names import ORT_DOMAIN, PYTHON_OP, qualified_name

__all__ = ["add_call"]


def add_call(
    op: Emitter, function: type, inputs: Sequence[ir.Value], constants: Sequence[Any], likes: Sequence[ir.Value]
) -> list[ir.Value]:
    """Add a PythonOp that calls a Function, whose gradient nobody asks for.

    Args:
        op: Takes the node. The model has to import the domain "com.microsoft", and the session has to be allowed the Function.
        function: Its forward takes the inputs, then the constants, and returns a tuple of tensors.
        inputs: Its tensors.
        constants: Its other arguments: numbers, texts, tuples of them.
        likes: For each tensor that it returns, a value of that shape; it has the type of the first input.

    Returns:
        What it returns, a value each.
    """
    kind = int(inputs[0].dtype or ir.DataType.FLOAT)
    ranks, made_ranks = (tuple(0 if value.shape is None else len(value.shape) for value in values) for values in (inputs, likes))
    outputs = len(likes)
    call = AutogradCall(
        id=op.scope.name(function.__name__),
        name=qualified_name(function),
        args=(*map(Slot, range(len(inputs))), *constants),
        outputs=tuple(map(Slot, range(outputs))),
        input_types=tuple(int(value.dtype or kind) for value in inputs),
        input_ranks=ranks,
        input_requires_grads=(False,) * len(inputs),
        output_types=(kind,) * outputs,
        output_ranks=made_ranks,
        output_requires_grads=(False,) * outputs,
    )
    made = op.node(PYTHON_OP, inputs, domain=ORT_DOMAIN, outputs=1 + outputs)
    node = made[0].producer()
    node.attributes.update({a.name: a for a in ir_attributes(write_attributes(call))})
    made[0].type = ir.TensorType(ir.DataType.INT64)
    for value, like in zip(made[1:], likes, strict=True):
        value.type, value.shape = inputs[0].type, like.shape
    return list(made[1:])
