"""Reading a model from wherever it is, and what the engines need of it before it runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx.external_data_helper import load_external_data_for_tensor

from symbolics.errors import FormatError
from symbolics.node.metadata import check_version
from symbolics.node.names import ORT_DOMAIN, PYTHON_OP
from symbolics.node.text import shown

__all__ = ["attribute_values", "check_external_data", "drop_unread_contexts", "graphs", "nodes", "read_model", "tensors"]


def read_model(model: Any, *, load_data: bool = True) -> tuple[onnx.ModelProto, Path | None]:
    """The model as a proto, checked as far as a file from somewhere else must be.

    Args:
        model: A path, an onnx.ModelProto, an onnx_ir.Model, or an object whose ``model`` is one (a Program).
        load_data: Whether external data is read into the proto.

    Returns:
        The proto (the caller's own where that was given: do not change it), and the folder of its external data.

    Raises:
        FormatError: No ONNX model, a newer format version, or external data outside the model's folder.
        TypeError: Something else altogether.
    """
    folder: Path | None = None
    if isinstance(model, (str, os.PathLike)):
        path = Path(model)
        try:
            proto = onnx.load(path, load_external_data=False)
        except OSError:
            raise
        except Exception as error:  # protobuf's DecodeError has no public base
            raise FormatError(f"{path} is no ONNX model: {shown(str(error))}") from error
        folder = path.parent
    elif isinstance(model, onnx.ModelProto):
        proto = model
    elif isinstance(model, ir.Model):
        proto = ir.to_proto(model)
        bases = {Path(value.const_value.base_dir) for value in _ir_initializers(model) if isinstance(value.const_value, ir.ExternalTensor)}
        folder = bases.pop() if len(bases) == 1 else None
    elif isinstance(getattr(model, "model", None), (ir.Model, onnx.ModelProto)):
        return read_model(model.model, load_data=load_data)
    else:
        raise TypeError(f"a model is a path, an onnx.ModelProto, an onnx_ir.Model or a Program, not {type(model).__name__}")
    check_version({entry.key: entry.value for entry in proto.metadata_props})
    folder = folder or Path()
    external = check_external_data(proto, folder)
    if load_data and external:
        if proto is model:
            proto = onnx.ModelProto()
            proto.CopyFrom(model)
        for tensor in tensors(proto):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                load_external_data_for_tensor(tensor, str(folder))
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]
    return proto, folder if external else None


def _ir_initializers(model: ir.Model) -> Iterator[ir.Value]:
    for graph in model.graphs():
        yield from graph.initializers.values()


def check_external_data(proto: onnx.ModelProto, folder: Path) -> bool:
    """Whether the model has external data; all of it must lie in files below its folder.

    Raises:
        FormatError: A location is absolute, climbs out with "..", or passes through a link.
    """
    found = False
    root = folder.resolve()
    for tensor in tensors(proto):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        found = True
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        parts = location.replace("\\", "/").split("/")
        path = root.joinpath(*parts)
        steps = [root.joinpath(*parts[: i + 1]) for i in range(len(parts))]
        if (
            not location
            or os.path.isabs(location)
            or ":" in parts[0]
            or ".." in parts
            or "" in parts
            or any(step.is_symlink() for step in steps)
        ):
            raise FormatError(
                f"the tensor {shown(tensor.name)} has external data at {shown(location)}: a model may only read plain files below its own "
                "folder, by a relative path without '..' and without links; move the data there, or load and save the model yourself if you trust it"
            )
        if path.exists() and not path.is_file():
            raise FormatError(f"the tensor {shown(tensor.name)} has external data at {shown(location)}, which is no plain file")
    return found


def graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """Every graph of a model: the main one, functions, and the bodies inside them."""
    stack: list[Any] = [proto.graph, *proto.functions]
    while stack:
        graph = stack.pop()
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    stack.append(attribute.g)
                stack.extend(attribute.graphs)


def nodes(proto: onnx.ModelProto, *kinds: str) -> Iterator[tuple[Any, onnx.NodeProto]]:
    """(graph, node) for each node of ours."""
    for graph in graphs(proto):
        for node in graph.node:
            if node.domain == ORT_DOMAIN and node.op_type in kinds:
                yield graph, node


def tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor that may have external data: initializers and attributes."""
    for graph in graphs(proto):
        if isinstance(graph, onnx.GraphProto):
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield sparse.values
                yield sparse.indices
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors


def attribute_values(node: onnx.NodeProto) -> dict[str, Any]:
    """The attributes of a node as plain Python values.

    Raises:
        FormatError: One is not a number, a string or a list of them.
    """
    types = onnx.AttributeProto
    out: dict[str, Any] = {}
    for attribute in node.attribute:
        if attribute.ref_attr_name or attribute.type not in (types.INT, types.INTS, types.FLOAT, types.FLOATS, types.STRING):
            raise FormatError(f"the attribute {shown(attribute.name)} of the {node.op_type} {shown(node.name)!r} is of an unexpected type")
        value = onnx.helper.get_attribute_value(attribute)
        try:
            out[attribute.name] = value.decode() if isinstance(value, bytes) else list(value) if isinstance(value, Iterable) else value
        except UnicodeDecodeError as error:
            raise FormatError(f"the attribute {shown(attribute.name)} of the {node.op_type} {shown(node.name)!r} is not UTF-8") from error
    return out


def drop_unread_contexts(proto: onnx.ModelProto) -> bool:
    """Take the names away from context outputs that nobody reads, so that runs make no contexts for them.

    Returns:
        Whether anything changed.
    """
    read: set[str] = set()
    for graph in graphs(proto):
        read.update(name for node in graph.node for name in node.input)
        read.update(value if isinstance(value, str) else value.name for value in graph.output)
    changed = False
    for graph, node in nodes(proto, PYTHON_OP):
        if node.output and node.output[0] and node.output[0] not in read:
            if isinstance(graph, onnx.GraphProto):
                for info in [info for info in graph.value_info if info.name == node.output[0]]:
                    graph.value_info.remove(info)
            node.output[0] = ""
            changed = True
    return changed
