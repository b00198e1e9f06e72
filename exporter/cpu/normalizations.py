"""A BatchNormalization of given statistics as a product and a sum, where a chain of elementwise operators follows, in memory.

The gradient of one that trains takes a part of its own from another one (symbolics/gradients/normalization.py): as an operator that is one
pass over memory, and as a part of a chain none.
"""

from __future__ import annotations

import onnx_ir as ir

from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix
from symbolics.graph.values import attr, made_by, trains

__all__ = ["ALONG_CHANNELS", "write_out_normalizations"]

#: In the ``meta`` of a factor or a term: a chain looks whether it lies along the second axis of what is normalized, as the operator does.
ALONG_CHANNELS = "along channels"

_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE}


def write_out_normalizations(model: ir.Model) -> int:
    """Replace what is written above in a model whose chains are about to be fused.

    Args:
        model: Changed.

    Returns:
        How many nodes were replaced.
    """
    nodes = [node for node in model.graph if node.op_type == "BatchNormalization" and node.domain == "" and _is_in_a_chain(node)]
    if not nodes:
        return 0
    scope = Scope(free_prefix(model.graph, "normalized/"), lambda value: False)
    for node in nodes:
        op = Emitter(scope)
        replace(scope, node, op.nodes, [_written_out(op, node)])
    scope.register(model.graph)
    return len(nodes)


def _is_in_a_chain(node: ir.Node) -> bool:
    """Whether a node's scale is computed, as in gradients alone, and its result is taken from a product: that is a chain of four operators,
    which is always worth a node, and this looks at the shapes of what it reads.
    """
    values = [value for value in node.inputs if value is not None]
    if trains(node) or len(values) != 5 or len(node.outputs) != 1 or made_by(values[1], "Mul") is None:
        return False
    kinds = {value.dtype for value in values}
    if values[0].shape is None or len(values[0].shape) < 2 or len(kinds) != 1 or not kinds <= _FLOATS:
        return False
    uses = list(node.outputs[0].uses())
    if len(uses) != 1 or node.outputs[0].is_graph_output():
        return False
    reader, place = uses[0]
    return reader.op_type == "Sub" and reader.domain == "" and place == 1 and made_by(reader.inputs[0], "Mul") is not None


def _written_out(op: Emitter, node: ir.Node) -> ir.Value:
    """As onnxruntime computes it: by one factor and one term of each channel."""
    x, scale, bias, mean, variance = (value for value in node.inputs if value is not None)
    with op.arithmetic():
        factor = scale / op.Sqrt(variance + float(attr(node, "epsilon")))
        term = bias - mean * factor
        behind = len(x.shape or ()) - 2
        factor, term = (op.Reshape(value, [-1, *[1] * behind]) if behind else value for value in (factor, term))
        factor.meta[ALONG_CHANNELS] = term.meta[ALONG_CHANNELS] = True
        made: ir.Value = x * factor + term
    return made
