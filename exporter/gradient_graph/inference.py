"""Types and shapes of all values of a model: ONNX's inference, and what `symbolics.graph.shapes` finds beyond it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import onnx
import onnx_ir as ir

from symbolics.errors import FormatError
from symbolics.graph.shapes import guess_ranks
from symbolics.graph.values import array_of, is_python_op, is_static, name_of
from symbolics.graph.walk import subgraphs, walk
from symbolics.node.attributes import SPECS, check_types, values_of
from symbolics.node.limits import MAX_UNROLLED
from symbolics.text import reason, shown

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
    proto = skeleton(model)
    _hide_ranges(model.graph, proto.graph)
    proto.opset_import.add(domain=_HIDDEN, version=1)
    try:
        return onnx.shape_inference.infer_shapes(proto, check_type=False, strict_mode=False, data_prop=_propagates(model))
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        raise FormatError(f"ONNX cannot infer the types of the model, which contradict each other: {reason(error)}") from error


# ---------------------------------------------------------------------------------------------- what inference may write down
# ONNX's inference writes vectors that are known down, element by element: 140 bytes each. A file may say that they are huge.
_HIDDEN = "pythonop.hidden"
_PASSES_ON = frozenset("Add Cast Concat Gather Identity Mul Reshape Slice Squeeze Sub Unsqueeze".split())


def _hide_ranges(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    """Take away from inference those Range whose length it could only find out by counting, or that are long."""
    for node, twin in zip(graph, proto.node):
        if node.op_type == "Range" and node.domain == "" and _count(node) > MAX_UNROLLED:
            twin.domain = _HIDDEN
            first, out = node.inputs[0], node.outputs[0]
            if (
                first is not None
                and first.dtype is not None
                and not any(info.name == out.name for info in (*proto.value_info, *proto.output))
            ):
                proto.value_info.append(onnx.helper.make_tensor_value_info(name_of(out), first.dtype, [None]))
        inner = [a.g for a in twin.attribute if a.type == onnx.AttributeProto.GRAPH]
        for body, twin_body in zip(subgraphs(node), inner):
            _hide_ranges(body, twin_body)


def _count(node: ir.Node) -> float:
    """How many elements a Range makes, infinity where that is not written in the file."""
    arrays = [array_of(v) for v in node.inputs]
    numbers = [float(a.reshape(-1)[0]) for a in arrays if a is not None and a.size]
    if len(numbers) != 3 or not numbers[2]:
        return math.inf
    start, limit, delta = numbers
    return max(0.0, (limit - start) / delta)


def _propagates(model: ir.Model) -> bool:
    """Whether vectors of shapes stay short: each Concat of a chain may double them."""
    gains: dict[ir.OperatorIdentifier, int] = {}
    for key in model.functions:
        _gain(model, key, gains)
    return _longest(model, model.graph, {}, _A_SHAPE, gains) <= MAX_UNROLLED


_A_SHAPE = 64


def _gain(model: ir.Model, key: ir.OperatorIdentifier, gains: dict[ir.OperatorIdentifier, int]) -> int:
    """How many times as long as what it reads a function makes a vector, at most."""
    if key not in gains:
        gains[key] = 1  # functions do not call themselves: the reader has seen to it
        for node in walk(model.functions[key]):
            if node.op_identifier() in model.functions:
                _gain(model, node.op_identifier(), gains)
        gains[key] = _longest(model, model.functions[key], {}, 1, gains)
    return gains[key]


def _longest(
    model: ir.Model, nodes: Iterable[ir.Node], lengths: dict[ir.Value, int], other: int, gains: dict[ir.OperatorIdentifier, int]
) -> int:
    """An upper bound of the lengths of vectors that are passed on; ``other`` is that of what is not."""
    most = other
    for node in nodes:
        key = node.op_identifier()
        if key in gains or (node.op_type in _PASSES_ON and node.domain == ""):
            sizes = [lengths.get(v, other) if (array := v.const_value) is None else array.size for v in node.inputs if v is not None]
            found = sum(sizes) if node.op_type == "Concat" else max(sizes, default=1) * gains.get(key, 1)
            most = max(most, found)
            lengths.update(dict.fromkeys(node.outputs, found))
        for body in subgraphs(node):
            most = max(most, _longest(model, body, lengths, other, gains))
    return most


def skeleton(model: ir.Model) -> onnx.ModelProto:
    """The model as a message with its large weights, and those in other files, as inputs.

    Raises:
        FormatError: The model cannot be written down: a name is no text, a tensor is not what its type says.
    """
    graph = model.graph
    weights = [v for v in graph.initializers.values() if is_weight(v.const_value)]
    added = [v for v in weights if not v.is_graph_input()]
    for value in weights:
        del graph.initializers[name_of(value)]
    graph.inputs.extend(added)
    try:
        return ir.to_proto(model)
    except (ir.serde.SerdeError, ValueError, TypeError, OSError) as error:
        raise FormatError.damaged("the model", f"it cannot be written as ONNX: {reason(error)}") from error
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
