"""Program: an exported model in memory, and how it reaches the disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

import onnx
import onnx_ir as ir

from exporter.errors import short
from exporter.files.save import Files, saving
from exporter.files.tensors import HeldTensor, check_data, held_tensors, inside, is_external, replacing
from exporter.files.valid import check_valid
from symbolics.errors import ExportError, FormatError, PythonopError
from symbolics.graph.values import function_of, is_python_op
from symbolics.graph.walk import walk
from symbolics.node.dialects import to_dialect
from symbolics.node.metadata import state_of
from symbolics.node.names import MODULE_PROPERTY, OPAQUE_PROPERTY, SOURCE_PROPERTY, is_operator
from symbolics.text import clean

__all__ = ["OpaqueNode", "PortableCall", "Program", "model_bytes", "save_model", "save_models"]

# protobuf cannot write more than 2 GiB; torch.onnx switches to external data here, so do we.
_EXTERNAL_ABOVE = 1536 * 1024 * 1024
_LARGEST = 2**31
_A_FUNCTION, _AN_OPERATOR = "it is called as an autograd Function", "it is called as an operator of torch.library"
# Bytes of a tensor that is not worth an entry in another file.
_SMALL = 256


@dataclass(frozen=True)
class PortableCall:
    """What became of one call in a file that was to be portable.

    Attributes:
        function: The Function, ``module:qualname``.
        module: The path of the module that makes the call.
        source: ``module.name:line`` of the code that makes it.
        kind: ``"function"``: an ONNX function, which needs no Python; ``"PythonOp"``.
        reason: Why it is a PythonOp; of a function that was not asked for, why no PythonOp can say the call; "" otherwise.
    """

    function: str
    module: str
    source: str
    kind: Literal["function", "PythonOp"]
    reason: str = ""


@dataclass(frozen=True)
class OpaqueNode:
    """A node of a program that needs Python where the file runs.

    Attributes:
        name: The node's name.
        function: The Function, ``module:qualname``; the operator, ``aten::linalg_solve.default``; or the module or function that it calls.
        module: The path of the module that makes the call.
        source: ``module.name:line`` of the code that makes it.
        reason: Why it is no ONNX operator.
    """

    name: str
    function: str
    module: str
    source: str
    reason: str


@dataclass(repr=False)
class Program:
    """An exported model: an ONNX model in memory, which `save` writes to a file.

    Attributes:
        model: The ONNX model, an onnx_ir.Model.
        inlined: Functions that were inlined although you did not ask for it: qualified name -> reason.
        portable: What became of each call of a Function that was to be portable.
        torch_program: torch's ONNXProgram with dynamo=True, None otherwise.
        asked: What the export was told of the file: ``export_params``, ``keep_initializers_as_inputs``, ``external_data``.
            ``save`` follows it.
        fallback: The way out that ``fallback=True`` took, as you would write it in a call (``dynamo=False``). "" where none
            was needed.
    """

    model: ir.Model
    inlined: dict[str, str] = field(default_factory=dict)
    torch_program: Any = None
    portable: list[PortableCall] = field(default_factory=list)
    asked: dict[str, Any] = field(default_factory=dict)
    fallback: str = ""

    def __repr__(self) -> str:
        """One line: its size, inputs and outputs."""
        from exporter.files.summary import signature  # reads nodes, which who only exports does without

        graph = self.model.graph
        size = f"{len(list(graph.all_nodes()))} nodes, {len(self.opaque)} PythonOp"
        inlined = f", {len(self.inlined)} Functions inlined" if self.inlined else ""
        return f"{type(self).__name__}({size}{inlined}: {signature(graph)})"

    def _repr_html_(self) -> str:
        """What `pythonop inspect` says first, for a notebook."""
        from exporter.files.inspect import inspect_model
        from exporter.files.summary import as_html, summary_of

        return as_html(summary_of(inspect_model(self.model), type(self).__name__))

    @property
    def opaque(self) -> list[OpaqueNode]:
        """The nodes of the model that need Python, in their order. Nodes that compute gradients are not among them."""
        return [
            OpaqueNode(
                node.name or "",
                function := function_of(node),
                node.metadata_props.get(MODULE_PROPERTY, ""),
                node.metadata_props.get(SOURCE_PROPERTY, ""),
                node.metadata_props.get(OPAQUE_PROPERTY) or (_AN_OPERATOR if is_operator(function) else _A_FUNCTION),
            )
            for part in (self.model.graph, *self.model.functions.values())
            for node in walk(part)
            if is_python_op(node)
        ]

    @property
    def model_proto(self) -> onnx.ModelProto:
        """The model as an onnx.ModelProto, with the parameters inside."""
        return ir.to_proto(self.model)

    @short
    def save(
        self, path: str | os.PathLike[str], schema: str | None = None, *, external_data: bool | None = None, check: bool = True
    ) -> None:
        """Write the model to a file. The file appears whole or not at all, even if the process is killed.

        A file that is there already is replaced, and its permissions are kept. Behind a symbolic link, the file that it leads to
        is replaced.

        Args:
            path: The file to write. With external data, tensors of more than 256 bytes go to ``<path>.<16 hex digits>.data``
                beside it. The digits are a digest of the data, so that a model never gets the data of another. Data that an older
                model at this path named is removed.
            schema: None: the format of docs/format.md. "documented", "ort-1.15", "ort-1.16" or "ort-1.17": the format of another
                reader. These have no ``call`` attribute; a warning says what is lost.
            external_data: Whether tensors are in a file of their own. Default: as the export was told, else only where the model
                exceeds protobuf's 2 GiB. Tensors whose values are in other files are copied.
            check: Whether the model has to pass onnx.checker (``full_check=True``). The values of large weights are not looked
                at. With ``schema``, the model is checked before it is put into that format.

        Raises:
            ExportError: The path cannot be written, the values of a tensor cannot be read, a node cannot be written in that
                ``schema``, or the model is not valid ONNX. Nothing is written then.
        """
        external_data = self.asked.get("external_data") if external_data is None else external_data
        model = self.as_asked()
        if schema is None:
            save_model(model, path, external_data=external_data, check=check)
        else:
            if check:
                check_valid(model)
            save_model(to_dialect(model, schema), path, external_data=external_data, check=False)

    def as_asked(self) -> ir.Model:
        """The model as its file has it, an onnx_ir.Model.

        Where the export was told so, all initializers are inputs too, or parameters and buffers are inputs only.
        """
        held = self.asked.get("export_params", True)
        if held and not self.asked.get("keep_initializers_as_inputs"):
            return self.model
        graph = (model := self.model.clone()).graph
        state = {entry.initializer for entry in (state_of(model) or {}).values()}
        named = [value for name, value in graph.initializers.items() if held or name in state]
        graph.inputs.extend(value for value in named if held or value.uses() or value.is_graph_output())
        for value in named if not held else ():
            graph.initializers.pop(str(value.name))
        return model


def save_model(model: ir.Model, path: str | os.PathLike[str], *, external_data: bool | None = None, check: bool = True) -> None:
    """Write a model as `Program.save` does.

    Raises:
        ExportError: As there.
    """
    save_models([(model, path)], external_data=external_data, check=check)


def save_models(
    models: Sequence[tuple[ir.Model, str | os.PathLike[str]]],
    *,
    external_data: bool | None = None,
    texts: Sequence[tuple[str, str | os.PathLike[str]]] = (),
    check: bool = True,
) -> None:
    """Write models to their paths as `Program.save` does, and texts in UTF-8; where one cannot be written, none is.

    Raises:
        ExportError: As there.
    """
    with saving() as files:
        for model, path in models:
            _write(files, model, path, external_data, check)
        for text, path in texts:
            files.open(path).write(text.encode())


def model_bytes(model: ir.Model) -> bytes:
    """A model as the bytes of a file that needs no other.

    Raises:
        ExportError: Values of a tensor cannot be read, or protobuf cannot hold them.
    """
    return _serialized(None, model, "a model into memory", False)


def _write(files: Files, model: ir.Model, path: str | os.PathLike[str], external_data: bool | None, check: bool) -> None:
    file = files.open(path)  # what cannot be written is refused before any work
    try:
        data = _serialized(files, model, path, external_data)
        if check:
            check_valid(model)
        file.write(data)
    except PythonopError:
        raise
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, LookupError) as error:  # what onnx_ir's parts raise
        reason = clean(str(error.__cause__ or error))
        raise ExportError(f"cannot write {path}: the model is damaged ({type(error).__name__}: {reason}); nothing was written") from error


def _serialized(files: Files | None, model: ir.Model, path: str | os.PathLike[str], external_data: bool | None) -> bytes:
    from symbolics.gradients.own import note_own_rules  # with all rules, which what only reads files does not need

    note_own_rules(model)
    held = list(held_tensors(model))
    size = sum(each.tensor.nbytes for each in held)
    external = external_data if external_data is not None else size > _EXTERNAL_ABOVE
    if not external and size >= _LARGEST:
        raise ExportError(
            f"cannot write {path}: its tensors have {size:,} bytes, and protobuf holds less than 2 GiB: "
            "save with external_data=True; nothing was written"
        )
    try:
        check_data(model)
        outside = {id(each.tensor): each.tensor for each in held if external and _goes_out(each)}
        replaced: dict[int, Any] = _outside(files, outside, path) if files is not None and outside else {}
        replaced |= {id(t): inside(t) for t, *_ in held if is_external(t) and id(t) not in outside}
    except (FormatError, ValueError) as error:  # onnx_ir's word for data that is not below its folder
        raise ExportError(f"cannot write {path}: {error}; nothing was written") from error
    with replacing(held, replaced):
        return ir.to_proto(model).SerializeToString()


def _goes_out(held: HeldTensor) -> bool:
    """Initializers that are not small; of other tensors those that are in another file already."""
    large = held.tensor.nbytes > _SMALL and held.tensor.dtype != ir.DataType.STRING
    return large and (held.initializer or is_external(held.tensor))


def _outside(files: Files, tensors: dict[int, Any], path: str | os.PathLike[str]) -> dict[int, Any]:
    """Write the data of a model; its tensors as they then are in the model's file, by the same keys."""
    # onnx_ir's own writer makes a folder for its drafts, which a killed process leaves, and wants to know the file's name before.
    offsets: dict[int, int] = {}

    def write(file: BinaryIO) -> None:
        for key, tensor in tensors.items():
            offsets[key] = file.tell()
            tensor.tofile(file)

    location = files.add_data(path, write)
    return {
        key: ir.ExternalTensor(
            location, offsets[key], tensor.nbytes, tensor.dtype, shape=tensor.shape, name=tensor.name,
            doc_string=tensor.doc_string, metadata_props=tensor.metadata_props,
        )
        for key, tensor in tensors.items()
    }  # fmt: skip
