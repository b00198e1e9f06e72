"""The one reader of models: from a path, bytes, a proto, an onnx_ir.Model or a Program, checked as a stranger's file must be."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir

from exporter.files.examine import check_calls, check_number, check_reference, check_tensor, operator_of
from exporter.files.proto import check_proto, graphs, inner_model, parsed, reading, title_of
from exporter.files.tensors import DataTensor, check_data, check_place, held_tensors, is_external
from symbolics.errors import FormatError
from symbolics.graph.walk import subgraphs, walk
from symbolics.node.backward import complete
from symbolics.node.metadata import check_version
from symbolics.text import shown

__all__ = ["check_complete", "check_order", "open_model"]


def open_model(source: Any, *, data: bool = True) -> ir.Model:
    """A model as onnx_ir holds it, in a copy that the caller may change. Values of external tensors are not read yet.

    Args:
        source: A path, the bytes of a file, an onnx.ModelProto, an onnx_ir.Model, or an object whose ``model`` is one (a Program).
        data: Whether external tensors will be read: they must then lie below the model's folder. False: only facts are wanted
            (`data_of` has them of the data).

    Raises:
        FormatError: There is no such file, it is no ONNX model, it is cut off or of a newer format version, or it has
            external data outside its folder.
        NoModelError: The source is something else altogether.
    """
    source = inner_model(source)
    with reading(source):
        if isinstance(source, ir.Model):
            try:
                model = source.clone()
            except (ValueError, RuntimeError):
                check_order(source)
                raise
            _check_model(model, data)
        else:
            proto, folder = parsed(source)
            check_proto(proto, folder if data else None)
            if any(graph.sparse_initializer for graph in graphs(proto) if isinstance(graph, onnx.GraphProto)):
                raise FormatError(f"{title_of(source)} has sparse initializers, which are not read here: write them as dense ones")
            _refuse_maps(proto, source)
            model = ir.from_proto(proto)
            for owner in (model.graph, *model.functions.values()):
                for node in walk(owner):
                    complete(node)
            for held in list(held_tensors(model)):
                if is_external(held.tensor):
                    held.put(DataTensor(held.tensor, folder))
        _forget_negative_sizes(model)
    check_version(model.metadata_props)
    return model


def _refuse_maps(proto: onnx.ModelProto, source: Any) -> None:
    """onnx_ir has no maps, which converters of classifiers put at the end of a file."""
    for graph in graphs(proto):
        values = [*graph.value_info] if isinstance(graph, onnx.FunctionProto) else [*graph.value_info, *graph.input, *graph.output]
        for value in values:
            inner = value.type
            while inner.WhichOneof("value") in ("sequence_type", "optional_type"):
                inner = (inner.sequence_type if inner.HasField("sequence_type") else inner.optional_type).elem_type
            if inner.HasField("map_type"):
                raise FormatError(
                    f"{title_of(source)}: {shown(value.name)!r} is a map, and maps are not read here: run the file with "
                    "exporter.inference_session, or convert the model to tensors (skl2onnx: options={'zipmap': False})"
                )


def _forget_negative_sizes(model: ir.Model) -> None:
    """Some exporters write -1 for a size that they do not know; ONNX's shape inference ends the process at a Slice of it."""
    owners: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    nodes = [node for owner in owners for node in walk(owner)]
    bodies = (body for node in nodes for body in subgraphs(node))
    values = [value for owner in (*owners, *bodies) for value in owner.inputs] + [value for node in nodes for value in node.outputs]
    for value in values:
        if value.shape is not None and any(isinstance(size, int) and size < 0 for size in value.shape):
            value.shape = ir.Shape([None if isinstance(size, int) and size < 0 else size for size in value.shape])


def check_complete(model: ir.Model) -> None:
    """Check what a model needs to run: outputs, values that are made before they are read, and the data of external tensors.

    Raises:
        FormatError: Something is missing; the message names it.
    """
    if not model.graph.outputs:
        raise FormatError("the model has no outputs: it is no ONNX model, or it is cut off")
    check_order(model)
    check_data(model)


def check_order(model: ir.Model) -> None:
    """Check that each value is made before it is read: a graph that reads in a circle, too, has one that is not.

    Raises:
        FormatError: One is not; the message names it and the node that reads it.
    """
    _check_values(model.graph, set())


def _check_model(model: ir.Model, data: bool) -> None:
    """What `check_proto` looks at, on a model in memory, which may have been a file before."""
    for part in (model.graph, *model.functions.values()):
        for node in walk(part):
            for attribute in node.attributes.values():
                if part is model.graph:
                    check_reference(node.op_type, attribute.name, attribute.ref_attr_name)
                check_number(
                    operator_of(node), node.name or "", len(node.outputs), attribute.name, attribute.ref_attr_name or attribute.value
                )
    bodies = {operator_of(function): list(map(operator_of, walk(function))) for function in model.functions.values()}
    check_calls(map(operator_of, walk(model.graph)) if bodies else (), bodies)
    for tensor, *_ in held_tensors(model):
        if is_external(tensor):
            if data:
                check_place(tensor)
        elif ir.serde.TensorProtoTensor in type(tensor).__mro__:
            check_tensor(tensor.raw)


def _check_values(graph: ir.Graph, outer: set[ir.Value]) -> None:
    known = outer | {*graph.inputs, *graph.initializers.values()}
    for node in graph:
        for value in node.inputs:
            if value is not None and value not in known:
                raise FormatError(
                    f"node {node.name!r} ({node.op_type}) reads {shown(str(value.name))!r}, which nothing before it makes: the model is damaged"
                )
        for body in subgraphs(node):
            _check_values(body, known)
        known.update(node.outputs)
    for value in graph.outputs:
        if value not in known:
            raise FormatError(f"the output {shown(str(value.name))!r} is made by no node: the model is damaged")
