"""Shapes and element types of a graph's values, as a table that passes share."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx_ir as ir

from exporter.files.skeleton import skeleton
from symbolics.graph.pool_sizes import infer_proto

__all__ = ["Shape", "ShapeAndType", "fact_of", "find_facts", "fixed_shape", "inferred_graph", "note_facts"]

#: A name stands for one number in the whole file; where it does not at a run, what relied on it is slower.
Shape = tuple[int | str, ...]
#: Shape and element type of a value; None for what is not known.
ShapeAndType = tuple[Shape | None, ir.DataType | None]


def fact_of(value: ir.Value, facts: Mapping[ir.Value, ShapeAndType]) -> ShapeAndType:
    """Shape and element type of a value: what was found out, else what it says itself."""
    shape, kind = facts.get(value, (None, None))
    if shape is None and value.shape is not None:
        shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return shape, kind or value.dtype


def fixed_shape(value: ir.Value, facts: Mapping[ir.Value, ShapeAndType]) -> tuple[int, ...] | None:
    """The shape of a value where all of it is known."""
    shape = fact_of(value, facts)[0]
    sizes = tuple(dim for dim in shape or () if isinstance(dim, int))
    return sizes if shape is not None and len(sizes) == len(shape) else None


def inferred_graph(model: ir.Model) -> onnx.GraphProto | None:
    """A model's graph with what ONNX infers of its values; None where it cannot: onnxruntime says what is wrong with it.

    An initializer that is an input as well has no value here: a caller may give another, and sizes with it.
    """
    try:
        proto = skeleton(model)
        given = {value.name for value in proto.graph.input}
        certain = [tensor for tensor in proto.graph.initializer if tensor.name not in given]
        if len(certain) < len(proto.graph.initializer):
            del proto.graph.initializer[:]
            proto.graph.initializer.extend(certain)
        return infer_proto(proto).graph
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        return None


def note_facts(graph: ir.Graph, inferred: onnx.GraphProto, facts: dict[ir.Value, ShapeAndType]) -> None:
    """Shape and element type of each value of a graph that has both."""
    infos = {v.name: v.type.tensor_type for v in (*inferred.input, *inferred.output, *inferred.value_info)}
    values = [*graph.inputs, *graph.initializers.values(), *(output for node in graph for output in node.outputs)]
    for value in values:
        info = infos.get(value.name or "")
        tensor = value.const_value
        if tensor is not None and not value.is_graph_input():  # else a caller may give another
            facts[value] = tuple(tensor.shape.numpy()), tensor.dtype
        elif info is not None and info.HasField("shape"):
            dims = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in info.shape.dim]
            if "" not in dims:
                facts[value] = tuple(dims), ir.DataType(info.elem_type)


def find_facts(model: ir.Model, facts: dict[ir.Value, ShapeAndType]) -> None:
    """Add what ONNX infers of a model's values to a table; nothing where it cannot."""
    inferred = inferred_graph(model)
    if inferred is not None:
        note_facts(model.graph, inferred, facts)
