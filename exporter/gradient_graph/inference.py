"""Types and shapes of all values of a model: ONNX's inference, and what `symbolics.graph.shapes` finds beyond it."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir

from symbolics.graph.shapes import guess_ranks
from symbolics.graph.values import attr, is_python_op, is_static, name_of
from symbolics.graph.walk import subgraphs, walk

__all__ = ["SMALL", "infer_shapes", "is_weight", "skeleton"]

SMALL = 256  # elements of an initializer that shape inference may have to read


def infer_shapes(model: ir.Model, *, only_where_missing: bool = False) -> None:
    """Types and shapes of all values, as far as ONNX can tell."""
    nodes = list(walk(model.graph))
    for node in nodes:
        if is_python_op(node):
            _type_python_op(node)
    if only_where_missing and all(o.type is not None and o.shape is not None for n in nodes for o in n.outputs if o.name):
        return
    _merge(model.graph, _inferred(model).graph)
    if guess_ranks(model.graph):
        _merge(model.graph, _inferred(model).graph)


def _inferred(model: ir.Model) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(skeleton(model), check_type=False, strict_mode=False, data_prop=True)


def skeleton(model: ir.Model) -> onnx.ModelProto:
    """The model as a message with its large weights, and those in other files, as inputs."""
    graph = model.graph
    weights = [v for v in graph.initializers.values() if is_weight(v.const_value)]
    added = [v for v in weights if not v.is_graph_input()]
    for value in weights:
        del graph.initializers[name_of(value)]
    graph.inputs.extend(added)
    try:
        return ir.to_proto(model)
    finally:
        for _ in added:  # one by one: a deleted slice would leave them marked as inputs
            graph.inputs.pop()
        for value in weights:
            graph.initializers[name_of(value)] = value


def is_weight(tensor: ir.TensorProtocol | None) -> bool:
    """Whether shape inference and checker do without the data of an initializer: it is large, or in a file of its own."""
    return tensor is None or tensor.size > SMALL or isinstance(tensor, ir.ExternalTensor)


def _merge(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    """Take over types, and shapes that say more than the known ones."""
    infos = {v.name: v.type.tensor_type for v in (*proto.value_info, *proto.output, *proto.input) if v.type.HasField("tensor_type")}
    for value in graph.inputs:
        if value.type is None and (info := infos.get(name_of(value))) is not None and info.elem_type:
            value.type = ir.TensorType(ir.DataType(info.elem_type))
            value.shape = ir.Shape(_dims(info)) if info.HasField("shape") else None
    for node, twin in zip(graph, proto.node):
        for value in node.outputs:
            info = infos.get(value.name or "")
            if info is None:
                continue
            if value.type is None and info.elem_type:
                value.type = ir.TensorType(ir.DataType(info.elem_type))
            if info.HasField("shape") and not is_static(value.shape):
                dims = _dims(info)
                if value.shape is None or any(type(d) is int for d in dims):
                    value.shape = ir.Shape(dims)
        inner = [a.g for a in twin.attribute if a.type == onnx.AttributeProto.GRAPH]
        for body, twin_body in zip(subgraphs(node), inner):
            _merge(body, twin_body)


def _dims(info: Any) -> list[int | str | None]:
    """The dims of an onnx.TypeProto.Tensor."""
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in info.shape.dim]


def _type_python_op(node: ir.Node) -> None:
    """Types and ranks of a PythonOp's outputs are among its attributes."""
    for out, kind, rank in zip(node.outputs[1:], attr(node, "output_tensor_types", ()), attr(node, "output_tensor_ranks", ())):
        out.type = out.type or ir.TensorType(ir.DataType(kind))
        out.shape = out.shape if out.shape is not None else ir.Shape([None] * rank)
    context = node.outputs[0]
    context.type, context.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(())
