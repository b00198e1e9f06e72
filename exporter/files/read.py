"""The one reader of models: from a path, bytes, a proto, an onnx_ir.Model or a Program, checked as a stranger's file must be."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx.external_data_helper import load_external_data_for_tensor

from exporter.files.examine import (
    Operator,
    check_calls,
    check_entries,
    check_external,
    check_rank,
    check_reference,
    check_tensor,
    check_texts,
    operator_of,
)
from exporter.files.tensors import check_data, external_tensors, held_tensors, is_external
from symbolics.errors import FormatError, PythonopError
from symbolics.graph.walk import subgraphs, walk
from symbolics.node.limits import MAX_NESTED
from symbolics.node.metadata import check_version
from symbolics.text import clean, shown

__all__ = ["check_complete", "graphs", "open_model", "open_proto", "reading"]


class UnreadableFileError(FormatError, OSError):
    """The system cannot read the file: it is a folder, or not for us."""


class MissingFileError(UnreadableFileError, FileNotFoundError):
    """There is no such file."""


class NoModelError(PythonopError, TypeError):
    """What was given as a model is of no type that holds one."""


def open_model(source: Any, *, data: bool = True) -> ir.Model:
    """A model as onnx_ir holds it, in a copy that the caller may change. Values of external tensors are not read yet.

    Args:
        source: A path, the bytes of a file, an onnx.ModelProto, an onnx_ir.Model, or an object whose ``model`` is one (a Program).
        data: Whether external tensors will be read: they must then lie below the model's folder. False: only facts are wanted.

    Raises:
        FormatError: There is no such file, it is no ONNX model, it is cut off or of a newer format version, or it has
            external data outside its folder.
        NoModelError: The source is something else altogether.
    """
    source = _inner(source)
    with reading(source):
        if isinstance(source, ir.Model):
            model = source.clone()
            _check_model(model, data)
        else:
            proto, folder = _parsed(source)
            _check_proto(proto, folder if data else None)
            if any(graph.sparse_initializer for graph in graphs(proto) if isinstance(graph, onnx.GraphProto)):
                raise FormatError(f"{_title(source)} has sparse initializers, which are not read here: write them as dense ones")
            _refuse_maps(proto, source)
            model = ir.from_proto(proto)
            for tensor in external_tensors(model):  # onnx_ir's set_base_dir passes functions by
                tensor.base_dir = folder
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
                    f"{_title(source)}: {shown(value.name)!r} is a map, and maps are not read here: run the file with "
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


def open_proto(source: Any, *, load_data: bool = False) -> tuple[onnx.ModelProto, Path | None]:
    """A model as protobuf, in a copy that the caller may change.

    Args:
        source: As `open_model` takes it.
        load_data: Whether external data is read into the proto.

    Returns:
        The proto, and the folder of its external data, None where it has none.

    Raises:
        FormatError, NoModelError: As `open_model`.
    """
    source = _inner(source)
    with reading(source):
        if isinstance(source, ir.Model):
            folders = {Path(tensor.base_dir) for tensor in external_tensors(source)}
            proto, folder = ir.to_proto(source), folders.pop() if len(folders) == 1 else Path()
        else:
            proto, folder = _parsed(source)
            if proto is source:
                proto = onnx.ModelProto()
                proto.CopyFrom(source)
        external = _check_proto(proto, folder)
        for tensor in external if load_data else ():
            load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
    check_version({entry.key: entry.value for entry in proto.metadata_props})
    return proto, folder if external else None


@contextlib.contextmanager
def reading(source: Any) -> Iterator[None]:
    """Around what reads a model: whatever its parts raise is one thing to the reader, a file that is no model.

    Raises:
        FormatError: In place of any exception that is not one of ours.
    """
    try:
        yield
    except PythonopError:
        raise
    except Exception as error:  # onnx, onnx_ir and protobuf have no common base, and raise whatever their parts raise
        raise _unreadable(source, error) from error


def check_complete(model: ir.Model) -> None:
    """Check what a model needs to run: outputs, values that are made before they are read, and the data of external tensors.

    Raises:
        FormatError: Something is missing; the message names it.
    """
    if not model.graph.outputs:
        raise FormatError("the model has no outputs: it is no ONNX model, or it is cut off")
    _check_values(model.graph, set())
    check_data(model)


def graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """Every graph of a model: the main one, functions, and the bodies inside them."""
    yield from (graph for graph, _ in _inside(proto.graph, *proto.functions))


def _inside(*outer: onnx.GraphProto | onnx.FunctionProto) -> Iterator[tuple[onnx.GraphProto | onnx.FunctionProto, int]]:
    """Graphs and functions, and the bodies inside them, each with how many are around it."""
    stack: list[tuple[Any, int]] = [(graph, 0) for graph in outer]
    while stack:
        graph, depth = stack.pop()
        yield graph, depth
        for attribute in _attributes(graph):
            if attribute.HasField("g"):
                stack.append((attribute.g, depth + 1))
            stack.extend((inner, depth + 1) for inner in attribute.graphs)


def _attributes(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.AttributeProto]:
    """The attributes of all nodes; of a function, the defaults of its own as well."""
    if isinstance(graph, onnx.FunctionProto):
        yield from graph.attribute_proto
    for node in graph.node:
        yield from node.attribute


# --------------------------------------------------------------------------------------------------------- the sources


def _inner(source: Any) -> Any:
    """What a Program holds; anything else as it is."""
    if isinstance(source, (str, os.PathLike, bytes, onnx.ModelProto, ir.Model)):
        return source
    inner = getattr(source, "model", None)
    if not isinstance(inner, (ir.Model, onnx.ModelProto)):
        raise NoModelError(f"a model is a path, bytes, an onnx.ModelProto, an onnx_ir.Model or a Program, not {type(source).__name__}")
    return inner


def _parsed(source: Any) -> tuple[onnx.ModelProto, Path]:
    """The proto (the caller's own where that was given), and the folder that its external data must be in."""
    if isinstance(source, onnx.ModelProto):
        return source, Path()
    try:
        if isinstance(source, bytes):
            proto, folder = onnx.load_model_from_string(source), Path()
        else:
            proto, folder = onnx.load(source, load_external_data=False), Path(source).parent
    except OSError as error:
        kind = MissingFileError if isinstance(error, FileNotFoundError) else UnreadableFileError
        raise kind(f"cannot read {clean(os.fspath(source))}: {error.strerror or error}") from error
    except Exception as error:  # protobuf's DecodeError has no public base
        raise _unreadable(source, error) from error
    # Protobuf reads many things without complaint: an empty file, and some text.
    if not proto.ir_version or not proto.HasField("graph") or not proto.opset_import:
        raise _unreadable(source, ValueError("it has no graph"))
    return proto, folder


def _title(source: Any) -> str:
    return clean(os.fspath(source)) if isinstance(source, (str, os.PathLike)) else f"what was read from {type(source).__name__}"


def _unreadable(source: Any, error: BaseException) -> FormatError:
    while error.__cause__ is not None:  # the outermost says the least
        error = error.__cause__
    reason = clean((str(error).strip().splitlines() or [type(error).__name__])[0])
    return FormatError(f"{_title(source)} is no ONNX model, or it is cut off ({reason})")


# ---------------------------------------------------------------------------------------------------------- the checks


def _check_proto(proto: onnx.ModelProto, folder: Path | None) -> list[onnx.TensorProto]:
    """All checks of `exporter.files.examine`, on a message.

    Args:
        proto: The model.
        folder: Where its external data must be; None: no values are wanted, only facts.

    Returns:
        The tensors whose values are in other files.
    """
    bodies = {operator_of(function): list(_calls(function)) for function in proto.functions}
    check_calls(_calls(proto.graph) if bodies else (), bodies)
    nested = 0
    for part in (proto.graph, *proto.functions):
        for graph, depth in _inside(part):
            _check_graph(graph, called=isinstance(part, onnx.FunctionProto))
            nested += max(depth - 2, 0) * len(graph.node)
    if nested > MAX_NESTED:
        raise FormatError(
            f"{nested} nodes of the model are inside three bodies and more, each counted for each of them; at most {MAX_NESTED} are read"
        )
    check_texts(proto.producer_name, proto.producer_version, proto.domain, *(o.domain for o in proto.opset_import))
    check_entries(proto)
    if folder is None:
        return []
    external = []
    for tensor in _tensors(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            check_external(tensor.name, tensor.data_type, tensor.dims, {e.key: e.value for e in tensor.external_data}, folder)
            external.append(tensor)
        else:
            check_tensor(tensor)
    return external


def _check_graph(graph: onnx.GraphProto | onnx.FunctionProto, called: bool) -> None:
    """One graph, without the bodies inside it; of a function and what is in one, attributes may refer to those of the call."""
    if isinstance(graph, onnx.GraphProto):
        for value in (*graph.value_info, *graph.input, *graph.output):
            check_rank(value.name, len(value.type.tensor_type.shape.dim))
            check_texts(value.name, *(dim.dim_param for dim in value.type.tensor_type.shape.dim))
        check_texts(graph.name, *(tensor.name for tensor in graph.initializer))
        check_entries(*graph.value_info, *graph.input, *graph.output)
    else:
        check_texts(graph.name, graph.domain, graph.overload, *graph.input, *graph.output, *graph.attribute)
    for node in graph.node:
        check_texts(node.name, node.op_type, node.domain, node.overload, *node.input, *node.output)
        for attribute in node.attribute:
            check_texts(attribute.name, attribute.ref_attr_name)
            if not called:
                check_reference(node.op_type, attribute.name, attribute.ref_attr_name)
    check_entries(graph, *graph.node)


def _check_model(model: ir.Model, data: bool) -> None:
    """The same on a model in memory, which may have been a file before."""
    for node in walk(model.graph):
        for attribute in node.attributes.values():
            check_reference(node.op_type, attribute.name, attribute.ref_attr_name)
    bodies = {operator_of(function): list(map(operator_of, walk(function))) for function in model.functions.values()}
    check_calls(map(operator_of, walk(model.graph)) if bodies else (), bodies)
    for tensor, *_ in held_tensors(model) if data else ():
        if is_external(tensor):
            entries = {"location": str(tensor.location), "offset": str(tensor.offset or 0), "length": str(tensor.length or "")}
            check_external(tensor.name, tensor.dtype, tensor.shape.numpy(), entries, Path(tensor.base_dir))
        elif ir.serde.TensorProtoTensor in type(tensor).__mro__:
            check_tensor(tensor.raw)


def _calls(part: onnx.GraphProto | onnx.FunctionProto) -> Iterator[Operator]:
    for graph, _ in _inside(part):
        yield from map(operator_of, graph.node)


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor that may have external data: initializers and attributes."""
    for graph in graphs(proto):
        if isinstance(graph, onnx.GraphProto):
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield sparse.values
                yield sparse.indices
        for attribute in _attributes(graph):
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


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
