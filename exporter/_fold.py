"""What the graph of the TorchScript exporter needs of an optimizer: constants folded, equal nodes merged.

It is what onnxscript.optimizer.optimize does, but its rewrite rules, which would take longer than the whole export. Each of the
passes walks over all nodes; those that find nothing in a graph without bodies and functions are left out.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxscript.optimizer

__all__ = ["fold"]

_BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def fold(model: ir.Model) -> None:
    """Fold and merge, in place."""
    graph = model.graph
    nested = any(attribute.type in _BODIES for node in graph for attribute in node.attributes.values())
    if model.functions:
        passes.InlinePass()(model)
    onnxscript.optimizer.fold_constants(model, onnx_shape_inference=False)
    if nested or not _remove_unused(graph):
        passes.RemoveUnusedNodesPass()(model)
    if nested or any(node.op_type == "Constant" for node in graph):
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    if nested:
        passes.LiftSubgraphInitializersToMainGraphPass()(model)
    passes.DeduplicateInitializersPass()(model)
    passes.CommonSubexpressionEliminationPass()(model)
    if nested or not _plain_outputs(graph):
        passes.OutputFixPass()(model)


def _remove_unused(graph: ir.Graph) -> bool:
    """Remove nodes and initializers that nobody reads.

    Returns:
        Whether that is all: an output that may be left out, and that nobody reads, is the business of onnx_ir's pass.
    """
    optional = False
    for node in reversed(graph):
        read = [bool(value.uses()) or value.is_graph_output() for value in node.outputs]
        if not any(read):
            graph.remove(node, safe=True)
        elif (not all(read) and node.domain == "") or (node.inputs and node.inputs[-1] is None):
            optional = True
    for name, value in list(graph.initializers.items()):
        if not (value.uses() or value.is_graph_output() or value.is_graph_input()):
            del graph.initializers[name]
    return not optional


def _plain_outputs(graph: ir.Graph) -> bool:
    """Whether each output of the graph is the output of a node, and none is there twice."""
    return len(set(graph.outputs)) == len(graph.outputs) and all(value.producer() is not None for value in graph.outputs)
