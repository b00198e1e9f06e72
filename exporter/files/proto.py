"""A model as protobuf, the way every file comes in: read, and examined. No onnx_ir here, which takes longer to import than onnxruntime."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

from exporter.files.data_file import open_data
from exporter.files.examine import (
    Operator,
    check_calls,
    check_entries,
    check_external,
    check_number,
    check_numbers,
    check_rank,
    check_reference,
    check_tensor,
    check_texts,
    data_size,
    missing_data,
    operator_of,
    size_of,
)
from symbolics.errors import FormatError, PythonopError
from symbolics.node.limits import MAX_NESTED
from symbolics.node.metadata import check_version
from symbolics.text import causes, clean, shown

__all__ = [
    "MissingFileError",
    "NoModelError",
    "UnreadableFileError",
    "check_plain",
    "check_proto",
    "check_there",
    "graphs",
    "inner_model",
    "open_proto",
    "parsed",
    "reading",
    "title_of",
]


class UnreadableFileError(FormatError, OSError):
    """The system cannot read the file: it is a folder, or not for us."""


class MissingFileError(UnreadableFileError, FileNotFoundError):
    """There is no such file."""


class NoModelError(PythonopError, TypeError):
    """What was given as a model is of no type that holds one."""


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
    source = inner_model(source)
    with reading(source):
        if not isinstance(source, _MESSAGES):
            import onnx_ir as ir

            from exporter.files.tensors import external_tensors

            folders = {Path(tensor.base_dir) for tensor in external_tensors(source)}
            proto, folder = ir.to_proto(source), folders.pop() if len(folders) == 1 else Path()
        else:
            proto, folder = parsed(source)
            if proto is source:
                proto = onnx.ModelProto()
                proto.CopyFrom(source)
        external = check_proto(proto, folder)
        for tensor in external if load_data else ():
            entries = {entry.key: entry.value for entry in tensor.external_data}
            count = data_size(tensor.data_type, tensor.dims)
            with open_data(tensor.name, entries["location"], folder, int(entries.get("offset") or 0), count) as file:
                tensor.raw_data = file.read(count)
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
    check_version({entry.key: entry.value for entry in proto.metadata_props})
    return proto, folder if external else None


def check_there(proto: onnx.ModelProto, folder: Path) -> None:
    """Check that the files of external data are there: for a runtime that opens them itself, and whose own words say no way out.

    Raises:
        FormatError: One is not.
    """
    for tensor in _tensors(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
            if size_of(folder / location) is None:
                raise missing_data(tensor.name, folder / location)


@contextlib.contextmanager
def reading(source: Any) -> Iterator[None]:
    """Around what reads a model: whatever its parts raise is one thing to the reader, a file that is no model.

    Raises:
        FormatError: In place of any exception that is not one of ours; what only a fault of pythonop's own code raises stays as it is.
    """
    try:
        yield
    except PythonopError:
        raise
    except Exception as error:  # onnx, onnx_ir and protobuf have no common base, and raise whatever their parts raise
        if isinstance(error, _FAULTS) and _in_our_code(error):
            raise
        raise _unreadable(source, error) from error


#: Names that are not there: in code of ours no file is to blame, but a release of another package that lacks them.
_FAULTS = (AttributeError, NameError, ImportError)


def _in_our_code(error: BaseException) -> bool:
    """Whether the innermost step on the way to an error is one of pythonop's own."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return step is not None and str(step.tb_frame.f_globals.get("__name__")).partition(".")[0] in ("exporter", "symbolics")


def graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """Every graph of a model, in no order to rely on: the main one, functions, and the bodies inside them."""
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


_MESSAGES = (str, os.PathLike, bytes, onnx.ModelProto)


def inner_model(source: Any) -> Any:
    """What a Program holds; anything else as it is.

    Raises:
        NoModelError: It holds no model.
    """
    if isinstance(source, _MESSAGES):
        return source
    import onnx_ir as ir

    if isinstance(source, ir.Model):
        return source
    inner = getattr(source, "model", None)
    if not isinstance(inner, (ir.Model, onnx.ModelProto)):
        raise NoModelError(f"a model is a path, bytes, an onnx.ModelProto, an onnx_ir.Model or a Program, not {type(source).__name__}")
    return inner


def parsed(source: Any) -> tuple[onnx.ModelProto, Path]:
    """The proto (the caller's own where that was given), and the folder that its external data must be in."""
    if isinstance(source, onnx.ModelProto):
        return source, Path()
    try:
        if isinstance(source, bytes):
            proto, folder = onnx.load_model_from_string(source), Path()
        else:
            check_plain(source)
            proto, folder = onnx.load(source, load_external_data=False), Path(source).parent
    except PythonopError:
        raise
    except OSError as error:
        kind = MissingFileError if isinstance(error, FileNotFoundError) else UnreadableFileError
        raise kind(f"cannot read {clean(os.fspath(source))}: {error.strerror or error}") from error
    except Exception as error:  # protobuf's DecodeError has no public base
        raise _unreadable(source, error) from error
    # Protobuf reads many things without complaint: an empty file, and some text.
    if not proto.ir_version or not proto.HasField("graph") or not proto.opset_import:
        raise _unreadable(source, ValueError("it has no graph"))
    return proto, folder


def check_plain(path: str | os.PathLike[str]) -> None:
    """Refuse what never ends, or waits for a writer: a pipe or a device in the place of a file.

    Raises:
        UnreadableFileError: It is one.
        OSError: There is nothing, or the system does not say.
    """
    kind = os.stat(path).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # who reads a folder says that it is one
        raise UnreadableFileError(f"cannot read {clean(os.fspath(path))}: it is no plain file. Copy what it gives into one")


def title_of(source: Any) -> str:
    """How messages name a source."""
    return clean(os.fspath(source)) if isinstance(source, (str, os.PathLike)) else f"what was read from {type(source).__name__}"


def _unreadable(source: Any, error: BaseException) -> FormatError:
    error = list(causes(error))[-1]  # the outermost says the least
    reason = clean((str(error).strip().splitlines() or [type(error).__name__])[0])
    return FormatError(f"{title_of(source)} is no ONNX model, or it is cut off ({reason})")


# ---------------------------------------------------------------------------------------------------------- the checks


def check_proto(proto: onnx.ModelProto, folder: Path | None) -> list[onnx.TensorProto]:
    """All checks of `exporter.files.examine`, on a message.

    Args:
        proto: The model.
        folder: Where its external data must be; None: nobody will read them.

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
    external = []
    for tensor in _tensors(proto):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            if len(entries) < len(tensor.external_data):  # readers take the first or the last of two
                raise FormatError.damaged(f"the external data of the tensor {shown(tensor.name)!r}", "an entry stands there twice")
            if folder is not None:
                check_external(tensor.name, tensor.data_type, tensor.dims, entries, folder)
            else:
                check_numbers(tensor.name, entries)
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
            check_number(operator_of(node), node.name, len(node.output), attribute.name, attribute.ref_attr_name or attribute.i)
    check_entries(graph, *graph.node)


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
            for sparse in (*([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else ()), *attribute.sparse_tensors):
                yield sparse.values
                yield sparse.indices
