"""Which tensors of a file that another tool wrote are weights: it has no table of its state that says so."""

from __future__ import annotations

import itertools
from collections import Counter

import onnx_ir as ir
import onnx_ir.passes.common as passes

from symbolics.graph.walk import subgraphs, walk
from symbolics.node.metadata import read_state

__all__ = ["foreign_weights", "lift_initializers", "lift_weights"]

#: Inputs of operators that are settings or statistics, by their positions: no optimizer may move them.
_NO_WEIGHTS: dict[str, frozenset[int]] = {
    "BatchNormalization": frozenset({3, 4}),  # the running mean and variance
    "Resize": frozenset({1, 2}),
    "Upsample": frozenset({1}),
    "Clip": frozenset({1, 2}),
    "Pad": frozenset({2}),
    "Dropout": frozenset({1}),
    "OneHot": frozenset({2}),
    "QuantizeLinear": frozenset({1}),
    "DequantizeLinear": frozenset({1}),
}


def foreign_weights(model: ir.Model) -> list[str]:
    """The names of the initializers that are trained where no table says so: floats of rank 1 or more that some node reads as a weight."""
    return [name for name, value in model.graph.initializers.items() if _is_weight(value.const_value) and _is_read_as_weight(value)]


def _is_read_as_weight(value: ir.Value) -> bool:
    uses = value.uses()
    return not uses or any(node.domain != "" or place not in _NO_WEIGHTS.get(node.op_type, ()) for node, place in uses)


def lift_weights(model: ir.Model) -> None:
    """Make initializers of the main graph of all weights, in place, where no weight is one already.

    Paddle's exporter leaves them in Constant nodes, others in the branches of an If. A file with a float initializer of rank 1 or more, or with a table
    of its state, stays as it is: what it has in Constant nodes is meant as one.
    """
    graph = model.graph
    if read_state(model.metadata_props) is not None or any(_is_weight(v.const_value) for v in graph.initializers.values()):
        return
    lift_initializers(model)
    names = Counter(output.name for node in walk(graph) for output in node.outputs)
    for each in _graphs(graph):
        for node in list(each):
            attribute = node.attributes.get("value") if node.domain == "" and node.op_type == "Constant" else None
            if attribute is None or not isinstance(tensor := attribute.value, ir.TensorProtocol) or not _is_weight(tensor):
                continue
            value = node.outputs[0]
            if value.is_graph_output():
                continue
            name = value.name or "weight"
            if names[name] != 1 or name in graph.initializers:
                name = next(new for i in itertools.count(1) if (new := f"{name}_{i}") not in names and new not in graph.initializers)
            weight = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=_of_our_own(tensor, name)
            )
            value.replace_all_uses_with(weight)
            each.remove(node, safe=True)
            graph.register_initializer(weight)


def lift_initializers(model: ir.Model) -> None:
    """Move the initializers of bodies into the main graph, under other names where two have one."""
    inner = [each for each in _graphs(model.graph) if each is not model.graph]
    for value in (value for each in inner for value in each.initializers.values()):
        if value.const_value is not None and not isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = _of_our_own(value.const_value, value.name or "")
    if inner:
        passes.LiftSubgraphInitializersToMainGraphPass()(model)


def _of_our_own(tensor: ir.TensorProtocol, name: str) -> ir.LazyTensor:
    """The same elements under a name of its own: that of a tensor that was read from a proto is the caller's proto's."""
    return ir.LazyTensor(lambda: tensor, dtype=tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name)


def _graphs(graph: ir.Graph) -> list[ir.Graph]:
    return [graph, *(inner for node in walk(graph) for inner in subgraphs(node))]


def _is_weight(tensor: ir.TensorProtocol | None) -> bool:
    return tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape) > 0
