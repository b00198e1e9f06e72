"""What the graph of the TorchScript exporter needs of an optimizer: constants folded, equal nodes merged.

It is what onnxscript.optimizer.optimize does, but its rewrite rules, which would take longer than the whole export. Each of the
passes walks over all nodes; those that would find nothing are left out: torch has folded operators on constants, and equal nodes
without bodies were merged before they were nodes (exporter/forward/draft.py).
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
    _remove_casts(graph)
    folds = nested or not all(map(_settled, graph))
    if folds:
        unnamed = [value for node in graph for value in node.outputs if not (value.name or value.uses() or value.is_graph_output())]
        onnxscript.optimizer.fold_constants(model, onnx_shape_inference=False)
        for value in unnamed:  # it names them all, and a name says that somebody wants the output
            value.name = ""
    if nested or not _remove_unused(graph):
        passes.RemoveUnusedNodesPass()(model)
    if nested or any(node.op_type == "Constant" for node in graph):
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    if nested:
        passes.LiftSubgraphInitializersToMainGraphPass()(model)
    if folds:
        passes.DeduplicateInitializersPass()(model)
        passes.CommonSubexpressionEliminationPass()(model)
    if nested or not _plain_outputs(graph):
        passes.OutputFixPass()(model)


def _remove_casts(graph: ir.Graph) -> None:
    """Remove casts of a tensor to the type that it has: TorchScript casts many a size."""
    for node in graph:
        if node.op_type == "Cast" and not node.domain and (value := node.inputs[0]) is not None:
            output = node.outputs[0]
            if value.dtype is not None and value.dtype == node.attributes["to"].as_int() and not output.is_graph_output():
                output.replace_all_uses_with(value)
                graph.remove(node, safe=True)


# Operators that onnxscript simplifies in cases that are not worth telling apart here.
_SIMPLIFIED = frozenset(
    "Abs CastLike ConcatFromSequence Constant Dropout Expand Identity If SequenceAt SequenceConstruct Size SplitToSequence".split()
)


def _settled(node: ir.Node) -> bool:
    """Whether onnxscript's folding would leave a node alone; where that is not plain, it counts as not settled."""
    if node.domain:
        return True
    if node.op_type in _SIMPLIFIED or all(value is None or value.const_value is not None for value in node.inputs):
        return False
    known = [value for value in node.inputs if value is not None]
    match node.op_type:
        case "Shape":  # the arithmetic on symbolic sizes ends where one of them is taken by a scalar index
            readers = node.outputs[0].consumers()
            return _is_dynamic(known[0]) and all(reader.op_type == "Gather" and _is_constant_scalar(reader.inputs[1]) for reader in readers)
        case "Reshape":  # to the shape that the tensor has
            return known[1].const_value is None or _is_dynamic(known[0])
        case "Concat":
            return len(known) > 1 and all(value.shape is None or 0 not in value.shape for value in known)
    return True


def _is_dynamic(value: ir.Value) -> bool:
    return value.shape is not None and not value.shape.is_static()


def _is_constant_scalar(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None and not value.const_value.shape


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
