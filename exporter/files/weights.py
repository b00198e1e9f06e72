"""Which tensors of a file that another tool wrote are weights: it has no table of its state that says so."""

from __future__ import annotations

import itertools
from collections import Counter

import onnx_ir as ir
import onnx_ir.passes.common as passes

from symbolics.graph.values import operator_text
from symbolics.graph.walk import subgraphs, walk
from symbolics.node.metadata import read_state
from symbolics.node.names import ORT_DOMAIN

__all__ = ["foreign_state", "lift_initializers", "lift_weights"]

_STATISTICS: dict[str, frozenset[int]] = {"BatchNormalization": frozenset({3, 4})}  # the running mean and variance
#: Inputs of operators that are settings, by their positions: rules and runtimes want to know their values.
_SETTINGS: dict[str, frozenset[int]] = {
    "Resize": frozenset({1, 2}),
    "Upsample": frozenset({1}),
    "Clip": frozenset({1, 2}),
    "Pad": frozenset({2}),
    "Dropout": frozenset({1}),
    "OneHot": frozenset({2}),
    "QuantizeLinear": frozenset({1}),
    "DequantizeLinear": frozenset({1}),
    "QLinearConv": frozenset({1, 4, 6}),
    "QLinearMatMul": frozenset({1, 4, 6}),
    f"{ORT_DOMAIN}::QuantizeLinear": frozenset({1}),
    f"{ORT_DOMAIN}::DequantizeLinear": frozenset({1}),
    f"{ORT_DOMAIN}::MatMulIntegerToFloat": frozenset({2, 3}),
    f"{ORT_DOMAIN}::DynamicQuantizeMatMul": frozenset({2}),
    f"{ORT_DOMAIN}::DynamicQuantizeLSTM": frozenset({8, 10}),
    f"{ORT_DOMAIN}::QGemm": frozenset({1, 4, 7}),
    f"{ORT_DOMAIN}::QAttention": frozenset({3, 4}),
}


def foreign_state(model: ir.Model) -> dict[str, bool]:
    """The state of a model where no table says what it is: its float initializers of rank 1 or more, unless they are settings of an operator.

    Returns:
        name -> whether it is trained; running statistics are not.
    """
    found = {name: _kind(value) for name, value in model.graph.initializers.items() if _is_array(value.const_value)}
    return {name: kind == "weight" for name, kind in found.items() if kind != "setting"}


def _kind(value: ir.Value) -> str:
    """What the readers of a value take it for: a setting, a statistic, or, where one of them says nothing of that, a weight."""
    uses = [(operator_text(node), place) for node, place in value.uses()]
    for kind, table in (("setting", _SETTINGS), ("statistic", {**_SETTINGS, **_STATISTICS})):
        if uses and all(place in table.get(op_type, ()) for op_type, place in uses):
            return kind
    return "weight"


def lift_weights(model: ir.Model) -> None:
    """Make initializers of the main graph of all weights, in place, where no weight is one already.

    Paddle's exporter leaves them in Constant nodes, others in the branches of an If. A file with a float initializer of rank 1 or more, or with a table
    of its state, stays as it is: what it has in Constant nodes is meant as one.
    """
    graph = model.graph
    if read_state(model.metadata_props) is not None or any(_is_array(v.const_value) for v in graph.initializers.values()):
        return
    lift_initializers(model)
    names = Counter(output.name for node in walk(graph) for output in node.outputs)
    for each in _graphs(graph):
        for node in list(each):
            attribute = node.attributes.get("value") if node.domain == "" and node.op_type == "Constant" else None
            if attribute is None or not isinstance(tensor := attribute.value, ir.TensorProtocol) or not _is_array(tensor):
                continue
            value = node.outputs[0]
            if value.is_graph_output() or _kind(value) == "setting":
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


def _is_array(tensor: ir.TensorProtocol | None) -> bool:
    return tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape) > 0
