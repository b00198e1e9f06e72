"""Types and shapes of all values of a model: ONNX's inference, and what `symbolics.graph.shapes` finds beyond it."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir

from exporter.files.skeleton import skeleton
from symbolics.errors import FormatError
from symbolics.graph.pool_sizes import infer_proto
from symbolics.graph.quantised import is_quantised
from symbolics.graph.shapes import guess_ranks
from symbolics.graph.values import is_python_op, is_static, name_of
from symbolics.graph.walk import subgraphs, walk
from symbolics.node.attributes import SPECS, check_types, values_of
from symbolics.node.limits import MAX_UNROLLED
from symbolics.text import reason, shown

__all__ = ["infer_shapes"]

_MOST_TURNS = 20


def infer_shapes(model: ir.Model, *, only_where_missing: bool = False) -> None:
    """Types and shapes of all values, as far as ONNX can tell."""
    nodes = list(walk(model.graph))
    for node in nodes:
        if is_python_op(node):
            _type_python_op(node)
    if only_where_missing and all(o.type is not None and o.shape is not None for n in nodes for o in n.outputs if o.name):
        return
    for follow_shapes in (False, True):  # what computes with shapes is followed where it is known to be short
        _merge(model.graph, _inferred(model, follow_shapes).graph)
        for _ in range(_MOST_TURNS if any(map(is_quantised, nodes)) else 1):  # what ONNX knows, and knows not, take turns in such files
            if not guess_ranks(model.graph):
                break
            _merge(model.graph, _inferred(model, follow_shapes).graph)


def _inferred(model: ir.Model, follow_shapes: bool) -> onnx.ModelProto:
    proto = skeleton(model)
    if follow_shapes:
        _hide_long_vectors(model, model.graph, proto.graph)
        proto.opset_import.add(domain=_HIDDEN, version=1)
    try:
        return infer_proto(proto, check_type=False, strict_mode=False, data_prop=follow_shapes)
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        raise FormatError(f"ONNX cannot infer the types of the model, which contradict each other: {reason(error)}") from error


# Following shapes, ONNX writes each vector that has a length down, element by element, at 140 bytes each. A file may say that
# they are huge: the nodes that pass such vectors on are then not ONNX's.
_HIDDEN = "pythonop.hidden"
_PASSES_ON = frozenset("Add Cast Concat Gather Identity Mul Range Reshape Size Slice Squeeze Sub Unsqueeze".split())


def _hide_long_vectors(model: ir.Model, graph: ir.Graph, proto: onnx.GraphProto) -> None:
    """Hide calls of functions, and nodes that pass vectors on which are long, or of which it is not known; types stay."""
    for node, twin in zip(graph, proto.node):
        passes_on = node.op_type in _PASSES_ON and node.domain == ""
        if node.op_identifier() in model.functions or (passes_on and not all(map(_is_short, (*node.inputs, *node.outputs)))):
            twin.domain = _HIDDEN
        inner = [a.g for a in twin.attribute if a.type == onnx.AttributeProto.GRAPH]
        for body, twin_body in zip(subgraphs(node), inner):
            _hide_long_vectors(model, body, twin_body)


def _is_short(value: ir.Value | None) -> bool:
    """Whether a value is no vector, or one of few elements; any other may turn out to be long."""
    if value is None or value.shape is None:
        return value is None
    return len(value.shape) != 1 or (isinstance(value.shape[0], int) and value.shape[0] <= MAX_UNROLLED)


def _merge(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    """Take over types, and shapes that say more than the known ones."""
    inferred = (*proto.value_info, *proto.output, *proto.input)
    infos = {v.name: v.type.tensor_type for v in inferred if v.type.HasField("tensor_type")}
    others = {v.name: v.type for v in inferred if v.type.HasField("sequence_type") or v.type.HasField("optional_type")}
    for value in graph.inputs:
        if value.type is None and (info := infos.get(name_of(value))) is not None and info.elem_type:
            value.type = ir.TensorType(ir.DataType(info.elem_type))
            value.shape = ir.Shape(_dims(info)) if info.HasField("shape") else None
    for node, twin in zip(graph, proto.node):
        for value in node.outputs:
            info = infos.get(value.name or "")
            if info is None:
                if value.type is None and (other := others.get(value.name or "")) is not None:
                    value.type = ir.serde.deserialize_type_proto_for_type(other)
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
    """Types and ranks of a PythonOp's outputs are among its attributes.

    Raises:
        FormatError: They are no types and ranks, or not of as many tensors as the node gives out.
    """
    values = values_of(node)
    check_types(values, SPECS, node.op_type, complete=False)
    types, ranks = values.get("output_tensor_types", ()), values.get("output_tensor_ranks", ())
    if not len(types) == len(ranks) == len(node.outputs[1:]):
        raise FormatError.damaged(
            f"the {node.op_type} {shown(node.name or '')!r}",
            f"it has {len(node.outputs[1:])} tensor outputs, and attributes for {len(types)} types and {len(ranks)} ranks",
        )
    for out, kind, rank in zip(node.outputs[1:], types, ranks, strict=True):
        out.type = out.type or ir.TensorType(ir.DataType(kind))
        out.shape = out.shape if out.shape is not None else ir.Shape([None] * rank)
    for context in node.outputs[:1]:
        context.type, context.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(())
