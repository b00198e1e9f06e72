"""What onnxruntime would compute in integers that round otherwise than the model does, kept in float.

Between DequantizeLinear and QuantizeLinear, onnxruntime gives weights and biases in float levels of its own making, adds and multiplies with ties that go
the other way, and averages and normalizes with another rounding: up to a fifth of the levels change. Of a quantiser right behind another one it makes a
single one (DoubleQDQPairsRemover). It does so where nothing stands between. A Sum of one value is that something: it costs a copy, has a gradient, and no
optimizer takes it out.
"""

from __future__ import annotations

import onnx_ir as ir

from exporter.quantization.names import free_name
from exporter.quantization.products import MOVES, Product
from symbolics.graph.scope import graph_names

__all__ = ["keep_in_float"]

#: What gets a weight in integers where it has one in float.
_WEIGHTED = {"Conv", "ConvTranspose", "Gemm"}
#: What is computed in integers that round otherwise.
_ROUNDED = {"Add", "AveragePool", "GlobalAveragePool", "Mul", "Softmax"}


def keep_in_float(model: ir.Model, products: list[Product]) -> None:
    """Put something between what stays in float and the integers before or behind it, in place."""
    names = graph_names(model.graph)
    integers = {product.node for product in products if not product.reason}
    for node in list(model.graph):
        if node.domain or node in integers:
            continue
        if node.inputs and node.inputs[0] is not None and (_is_second(node) or (node.op_type in _WEIGHTED and _from_levels(node.inputs[0]))):
            _divide(model.graph, names, node.inputs[0], [(node, 0)], node)
        elif node.op_type in _ROUNDED and any(value is not None and _from_levels(value) for value in node.inputs):
            uses = [(use.node, use.idx) for use in node.outputs[0].uses()]
            if not any(_to_levels(reader) for reader, _ in uses):
                continue
            if node.op_type == "Add":
                node.op_type = "Sum"  # the same numbers
            else:
                _divide(model.graph, names, node.outputs[0], uses, None)


def _divide(graph: ir.Graph, names: set[str], value: ir.Value, uses: list[tuple[ir.Node, int]], before: ir.Node | None) -> None:
    """Let some of a value's readers read a Sum of it alone."""
    name = free_name(names, f"{value.name}/float")
    node = ir.node("Sum", [value], name=free_name(names, f"{name}/Sum"))
    output = node.outputs[0]
    output.name, output.type, output.shape = name, value.type, value.shape
    maker = value.producer()
    if before is not None:
        graph.insert_before(before, node)
    elif maker is not None:
        graph.insert_after(maker, node)
    for reader, place in uses:
        reader.replace_input_with(place, output)


def _is_second(node: ir.Node) -> bool:
    """Whether a node is a QuantizeLinear of what a DequantizeLinear of another step or zero point gives; equal ones are one value."""
    before = node.inputs[0].producer() if node.op_type == "QuantizeLinear" and node.inputs[0] is not None else None
    return before is not None and not before.domain and before.op_type == "DequantizeLinear" and before.inputs[1:] != node.inputs[1:]


def _from_levels(value: ir.Value) -> bool:
    """Whether a value is made of levels, or of levels that were moved."""
    node = value.producer()
    while node is not None and not node.domain and node.op_type in MOVES and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and node.op_type == "DequantizeLinear"


def _to_levels(node: ir.Node) -> bool:
    """Whether a node makes levels of what it reads, or moves it to one that does."""
    if node.op_type == "QuantizeLinear":
        return True
    return not node.domain and node.op_type in {*MOVES, "Relu"} and any(_to_levels(use.node) for use in node.outputs[0].uses())
