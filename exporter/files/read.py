"""The one reader of models: from a path, bytes, a proto, an onnx_ir.Model or a Program, checked as a stranger's file must be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx.external_data_helper import load_external_data_for_tensor

from symbolics.errors import FormatError, PythonopError
from symbolics.graph.walk import subgraphs
from symbolics.node.metadata import check_version
from symbolics.node.text import clean, shown

__all__ = ["check_complete", "graphs", "open_model", "open_proto"]


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
    try:
        if isinstance(source, ir.Model):
            model = source.clone()
            if data:
                for tensor in _external_tensors(model):
                    _check_location(tensor.name, str(tensor.location), Path(tensor.base_dir))
        else:
            proto, folder = _parsed(source)
            model = ir.from_proto(proto)
            if data:
                _check_external(proto, folder)
            ir.external_data.set_base_dir(model.graph, folder)
    except PythonopError:
        raise
    except Exception as error:  # onnx_ir raises whatever its parts raise: to the reader it is one thing
        raise _unreadable(source, error) from error
    check_version(model.metadata_props)
    return model


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
    if isinstance(source, ir.Model):
        folders = {Path(tensor.base_dir) for tensor in _external_tensors(source)}
        proto, folder = ir.to_proto(source), folders.pop() if len(folders) == 1 else Path()
    else:
        proto, folder = _parsed(source)
        if proto is source:
            proto = onnx.ModelProto()
            proto.CopyFrom(source)
    check_version({entry.key: entry.value for entry in proto.metadata_props})
    external = _check_external(proto, folder)
    for tensor in external if load_data else ():
        load_external_data_for_tensor(tensor, str(folder))
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]
    return proto, folder if external else None


def check_complete(model: ir.Model) -> None:
    """Check what a model needs to run: outputs, values that are made before they are read, and the data of external tensors.

    Raises:
        FormatError: Something is missing; the message names it.
    """
    if not model.graph.outputs:
        raise FormatError("the model has no outputs: it is no ONNX model, or it is cut off")
    _check_values(model.graph, set())
    for tensor in _external_tensors(model):
        path, needed = Path(tensor.path), (tensor.offset or 0) + (tensor.length or 0)
        if not path.is_file():
            raise FormatError(f"the data of {tensor.name!r} is in {path}, which is not there: keep it beside the model")
        if (size := path.stat().st_size) < needed:
            raise FormatError(f"{path} has {size} bytes, and {tensor.name!r} lies at {needed} and before: the file was cut off")


def graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """Every graph of a model: the main one, functions, and the bodies inside them."""
    stack: list[Any] = [proto.graph, *proto.functions]
    while stack:
        graph = stack.pop()
        yield graph
        for attribute in _attributes(graph):
            if attribute.HasField("g"):
                stack.append(attribute.g)
            stack.extend(attribute.graphs)


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


def _unreadable(source: Any, error: BaseException) -> FormatError:
    what = clean(os.fspath(source)) if isinstance(source, (str, os.PathLike)) else f"what was read from {type(source).__name__}"
    while error.__cause__ is not None:  # the outermost says the least
        error = error.__cause__
    reason = clean((str(error).strip().splitlines() or [type(error).__name__])[0])
    return FormatError(f"{what} is no ONNX model, or it is cut off ({reason})")


# --------------------------------------------------------------------------------------------------- the external data


def _check_external(proto: onnx.ModelProto, folder: Path) -> list[onnx.TensorProto]:
    """The external tensors of a model, all of which lie in files below its folder."""
    found = [tensor for tensor in _tensors(proto) if tensor.data_location == onnx.TensorProto.EXTERNAL]
    for tensor in found:
        _check_location(tensor.name, next((entry.value for entry in tensor.external_data if entry.key == "location"), ""), folder)
    return found


def _check_location(name: str | None, location: str, folder: Path) -> None:
    """Refuse external data outside the folder of its model.

    Raises:
        FormatError: The location is absolute, climbs out with "..", passes through a link, or is no plain file.
    """
    parts, root = location.replace("\\", "/").split("/"), folder.resolve()
    steps = [root.joinpath(*parts[: i + 1]) for i in range(len(parts))]
    outside = not location or os.path.isabs(location) or ":" in parts[0] or ".." in parts or "" in parts
    where = f"the tensor {shown(name or '')} has external data at {shown(location)}"
    if outside or any(step.is_symlink() for step in steps):
        raise FormatError(
            f"{where}: a model may only read plain files below its own folder, by a relative path without '..' and without links; "
            "move the data there, or load and save the model yourself if you trust it"
        )
    if steps[-1].exists() and not steps[-1].is_file():
        raise FormatError(f"{where}, which is no plain file")


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


def _external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """The same of a model in memory: those whose values are in another file."""
    for part in (model.graph, *(function.graph for function in model.functions.values())):
        for graph in (part, *part.subgraphs()):
            found: list[Any] = [value.const_value for value in graph.initializers.values()]
            for value in (attribute.value for node in graph for attribute in node.attributes.values()):
                found += value if isinstance(value, (list, tuple)) else [value]
            # By type: isinstance asks a protocol of each tensor's members, slowly.
        yield from (tensor for tensor in found if ir.ExternalTensor in type(tensor).__mro__)


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
