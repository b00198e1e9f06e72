"""What a file says about its calls of autograd Functions, as numbers and texts: for `pythonop inspect` and for programs.

Nothing of the file runs, no name in it is imported, and no torch is needed.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from exporter.files.data_facts import DataFacts, data_of
from exporter.files.named import names_of_call, names_of_result
from exporter.files.read import open_model
from exporter.files.settings import settings_in
from symbolics.errors import FormatError
from symbolics.graph.values import is_mark, is_python_op, is_python_op_tangent, operator_text
from symbolics.node.arguments import Described, Unresolved
from symbolics.node.attributes import SPECS, check_types, read_attributes, tuples_of, values_of
from symbolics.node.backward import is_backward, targets_of
from symbolics.node.call import AutogradCall
from symbolics.node.containers import Partial, Slot
from symbolics.node.linked import Backward, backward_of
from symbolics.node.metadata import (
    Fingerprint,
    StateEntry,
    StepLayout,
    check_version,
    pairing_of,
    read_functions,
    read_state,
    read_values,
    step_of,
    tangents_of,
)
from symbolics.node.names import (
    BACKWARD_KEY,
    CALL_ATTRIBUTE,
    FUNCTION_KEY,
    GRADIENTS_KEY,
    MARK_COUNT_KEY,
    MODULE_PROPERTY,
    OPAQUE_PROPERTY,
    ORT_DOMAIN,
    OUTPUTS_KEY,
    PYTHON_OP_GRAD,
    SOURCE_PROPERTY,
    UNCHECKED_KEY,
)
from symbolics.text import clean

__all__ = ["CallFacts", "FileFacts", "LinkFacts", "called_nodes", "inspect_file", "inspect_model", "tensor_text"]


@dataclass
class CallFacts:
    """One call of an autograd Function, as texts.

    Attributes:
        function: ``module:qualname``; of an ONNX function that says none, its own name.
        node, graph: Its name, and where it stands: "" for the main graph.
        arguments: Text of each argument of forward, tensors by the names of their values; keywords as ``name=``.
        names: What it asks a process to know, each name whole: what it calls, and the classes and functions in its arguments and settings.
        settings: Of an opaque module, what it and the modules inside it have beside tensors, ``inner.scale = 2.0``.
        inputs, outputs: ``float32[2, N]`` per tensor, with a trailing ``*`` where it needs (or has) a gradient.
        flags: What is set of: training, inplace, context, autocast=..., passed=...
        module, source: Where the call came from, "" where the file does not say.
        id: The call's id, None for a node without ``call``.
        backward: The PythonOpGrads and PythonOpBackwards of this call: the node and what it gives gradients of.
        kind: ``"PythonOp"``; ``"PythonOpTangent"`` where tangents pass the call too; ``"function"`` for an ONNX function of the file with a backward of its own.
        opaque: Why it is a PythonOp where a portable file was asked for, or `opaque=` made it one; "" where the file does not say.
        error: What is wrong with it, None for nothing.
    """

    function: str
    node: str
    graph: str
    arguments: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    module: str = ""
    source: str = ""
    id: str | None = None
    backward: list[str] = field(default_factory=list)
    kind: Literal["PythonOp", "PythonOpTangent", "function"] = "PythonOp"
    opaque: str = ""
    error: str | None = None


@dataclass
class LinkFacts:
    """An ONNX function of the file with a backward of its own.

    Attributes:
        name, backward: ``domain::name`` of it and of its backward; "" where it has no gradient.
        function: ``module:qualname`` of the autograd Function that it was made of, "" where the file does not say.
        once: Whether its backward must not be differentiated again.
        error: What is wrong with the link, None for nothing.
    """

    name: str
    function: str
    backward: str = ""
    once: bool = False
    error: str | None = None


@dataclass
class FileFacts:
    """A file, as numbers and texts.

    Attributes:
        format_version: Of docs/format.md; None for a model that another exporter wrote.
        ir_version, opsets: Of ONNX.
        inputs, outputs: Name and type of each: ``("x", "float[batch, 3]")``.
        operators: How many nodes of each operator, subgraphs and functions included, the most frequent first.
        stop_gradients, stop_gradients_recorded: How many marks the graph has, how many the metadata says.
        gradients: How many PythonOpGrads and PythonOpBackwards the file has.
        training: Whether the file pairs values with their gradients.
        tangents: Whether it pairs values with their tangents.
        parameters, trainable, frozen, buffers, not_persistent: How many names of each.
        tied: Names that share an initializer, one list per group.
        rows: Its PythonOps and PythonOpTangents, subgraphs and functions included.
        portable: Its calls of ONNX functions that have a backward of their own, likewise.
        links: These functions.
        step: What the inputs and outputs of a training step are; None for any other file.
        functions: The Functions of the file -> the fingerprints of their code at the export, "" for a half that has none.
        values: The Functions of the file -> the values that they read beside their arguments, as they were at the export: ``mypkg.ops:Spike.slope``.
        allow: What a process has to allow to open and run the file, an entry each; without what damaged calls name.
        data: The files that values of tensors are in. Only `inspect_file` looks for them.
        unchecked: Why the Functions of the file were not compared with those of an eager run, "" where they were.
    """

    format_version: int | None
    ir_version: int
    opsets: dict[str, int]
    stop_gradients: int
    stop_gradients_recorded: int | None
    gradients: int
    training: bool
    parameters: int
    trainable: int
    frozen: int
    buffers: int
    not_persistent: int
    tied: list[list[str]]
    rows: list[CallFacts]
    tangents: bool = False
    portable: list[CallFacts] = field(default_factory=list)
    links: list[LinkFacts] = field(default_factory=list)
    step: StepLayout | None = None
    unchecked: str = ""
    functions: dict[str, Fingerprint] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    allow: list[str] = field(default_factory=list)
    data: list[DataFacts] = field(default_factory=list)
    inputs: list[tuple[str, str]] = field(default_factory=list)
    outputs: list[tuple[str, str]] = field(default_factory=list)
    operators: dict[str, int] = field(default_factory=dict)

    def damage(self) -> list[str]:
        """What is wrong with its calls, links and data files, in words; each kind once."""
        found: list[str] = []
        for what, which, total in (
            ("PythonOps cannot be read", self.rows, len(self.rows)),
            ("links of functions to their backward cannot be read", self.links, len(self.links)),
            ("data files cannot be read", self.data, len(self.data)),
        ):
            errors = [each.error for each in which if each.error is not None]
            found += [f"{len(errors)} of {total} {what}: {clean(errors[0], 500)}"] if errors else []
        return found

    def as_json(self) -> dict[str, Any]:
        """The same as plain dicts and lists."""
        return dataclasses.asdict(self)


def inspect_file(path: str | os.PathLike[str]) -> FileFacts:
    """What a file says.

    Raises:
        FormatError: The file cannot be read, is no ONNX model, or its metadata is damaged or of a newer format. A
            damaged node is no error: its row says what is wrong; nor is a data file that is not there or lies elsewhere.
    """
    model = open_model(path, data=False)
    return dataclasses.replace(inspect_model(model), data=data_of(model))


def inspect_model(model: ir.Model, *, names: bool = True) -> FileFacts:
    """The same for a model in memory.

    Args:
        model: The model.
        names: Whether arguments and gradients are called by the names of their values; otherwise by their places, as two files may share them.

    Raises:
        FormatError: The metadata is damaged or of a newer format.
    """
    metadata = model.metadata_props
    state = read_state(metadata) or {}
    places = list(_places(model))
    kinds = [entry.kind for entry in state.values()]
    backward = _backward(places)
    recorded = metadata.get(MARK_COUNT_KEY, "")
    pairing_of(model)  # a damaged one is an error here, too
    tangents, links = tangents_of(model), _links(model)
    rows = [_row(graph, node, backward, names) for graph, node in places if _is_called(node)]
    return FileFacts(
        format_version=check_version(metadata),
        ir_version=int(model.ir_version or 0),
        opsets=dict(model.opset_imports),
        stop_gradients=sum(is_mark(node) for _, node in places),
        stop_gradients_recorded=int(recorded) if recorded.isascii() and recorded.isdigit() and len(recorded) < 10 else None,
        gradients=sum(map(len, backward.values())),
        training=GRADIENTS_KEY in metadata,
        parameters=kinds.count("parameter"),
        trainable=sum(entry.trainable for entry in state.values()),
        frozen=sum(entry.kind == "parameter" and not entry.trainable for entry in state.values()),
        buffers=kinds.count("buffer"),
        not_persistent=sum(not entry.persistent for entry in state.values()),
        tied=_tied(state),
        rows=rows,
        tangents=tangents is not None,
        portable=[_portable_row(model, links, graph, node, names) for graph, node in places if _is_linked(model, node)],
        links=[_link(function, links[key]) for key, function in model.functions.items() if key in links],
        step=step_of(model),
        functions=read_functions(metadata),
        values=read_values(metadata),
        allow=list(dict.fromkeys([*(name for row in rows for name in row.names), *_of_result(model)])),
        unchecked=clean(metadata.get(UNCHECKED_KEY, "")),
        inputs=[(value.name or "", tensor_text(value)) for value in model.graph.inputs if value.name not in model.graph.initializers],
        outputs=[(value.name or "", tensor_text(value)) for value in model.graph.outputs],
        operators=dict(Counter(operator_text(node) for _, node in places).most_common()),
    )


def tensor_text(value: ir.Value | ir.TensorProtocol | None) -> str:
    """``float[batch, 3]`` of a value or of a weight; ``?`` where nothing says the type."""
    if value is None or value.dtype is None:
        return "?"
    kind = value.dtype.name.lower() + (f"[{', '.join(_dims(value.shape))}]" if value.shape is not None else "")
    return (
        kind
        if not isinstance(value, ir.Value) or isinstance(value.type, ir.TensorType)
        else f"{type(value.type).__name__.removesuffix('Type').lower()} of {kind}"
    )


def called_nodes(model: ir.Model) -> tuple[list[ir.Node], list[ir.Node]]:
    """The nodes that `FileFacts.rows` and `FileFacts.portable` tell of, in their order."""
    nodes = [node for _, node in _places(model)]
    return [node for node in nodes if _is_called(node)], [node for node in nodes if _is_linked(model, node)]


def _is_called(node: ir.Node) -> bool:
    return is_python_op(node) or is_python_op_tangent(node)


def _of_result(model: ir.Model) -> list[str]:
    try:
        return names_of_result(model)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise FormatError.damaged(f"metadata {OUTPUTS_KEY}", "it is not what docs/format.md says") from error


def _tied(state: dict[str, StateEntry]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name, entry in state.items():
        groups.setdefault(entry.initializer, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _places(model: ir.Model) -> Iterator[tuple[str, ir.Node]]:
    """Every node, with the name of where it stands."""
    places: list[tuple[str, ir.Graph | ir.Function]] = [("", model.graph)]
    places += [(f"function {function.domain}::{function.name}", function) for function in model.functions.values()]
    for name, graph in places:
        for node in ir.traversal.RecursiveGraphIterator(graph):
            inner = node.graph
            # The nodes of a function say the graph that it is made of.
            if inner is None or inner is getattr(graph, "graph", graph):
                yield name, node
            else:
                yield "/".join(filter(None, [name, f"subgraph {inner.name or ''}".strip()])), node


def _backward(places: list[tuple[str, ir.Node]]) -> dict[Any, list[ir.Node]]:
    """PythonOpGrads and PythonOpBackwards by what they share with their PythonOp: its context, or, where contexts left a loop, its call."""
    found: dict[Any, list[ir.Node]] = {}
    for _, node in places:
        if (node.domain, node.op_type) == (ORT_DOMAIN, PYTHON_OP_GRAD) or is_backward(node):
            found.setdefault(_pair_key(node, node.inputs[0] if node.inputs else None), []).append(node)
    return found


def _pair_key(node: ir.Node, context: ir.Value | None) -> Any:
    call = node.attributes.get(CALL_ATTRIBUTE)
    if call is not None and not call.is_ref() and call.type is ir.AttributeType.STRING:
        return call.value
    return id(context)


def _names(values: Sequence[ir.Value | None], named: bool) -> list[str]:
    if not named:
        return [f"tensor {i}" if value is not None else "" for i, value in enumerate(values)]
    return [value.name or "" if value is not None else "" for value in values]


def _row(graph: str, node: ir.Node, backward: dict[Any, list[ir.Node]], named: bool) -> CallFacts:
    row = CallFacts(
        "?",
        node.name or "",
        graph,
        module=node.metadata_props.get(MODULE_PROPERTY, ""),
        source=node.metadata_props.get(SOURCE_PROPERTY, ""),
        opaque=node.metadata_props.get(OPAQUE_PROPERTY, ""),
        kind="PythonOp" if is_python_op(node) else "PythonOpTangent",
    )
    try:
        values = values_of(node)
        check_types(values, SPECS, node.op_type, complete=False)
        row.function = str(values.get("name", values.get("func_name", "?")))
        if CALL_ATTRIBUTE in values:
            _fill_from_call(row, node, _decode(values), named)
        else:
            _fill_from_attributes(row, node, values, named)
        row.names = names_of_call(node)
    except FormatError as error:
        row.error = str(error)
    except (TypeError, ValueError, LookupError, AttributeError):  # attributes of other types than anybody has written
        row.error = str(FormatError.damaged(f"the attributes of the {node.op_type}", "they are not of the types that docs/format.md says"))
    for grad in () if row.kind != "PythonOp" else backward.get(_pair_key(node, node.outputs[0] if node.outputs else None), []):
        sources = targets_of(grad) if is_backward(grad) else node.inputs
        given = [name for name, output in zip(_names(sources, named), grad.outputs, strict=False) if name and output.name]
        row.backward.append(f"{(named and grad.name) or grad.op_type}: {', '.join(given) or 'nothing'}")
    return row


def _is_linked(model: ir.Model, node: ir.Node) -> bool:
    function = model.functions.get(node.op_identifier())
    return function is not None and BACKWARD_KEY in function.metadata_props


def _links(model: ir.Model) -> dict[ir.OperatorIdentifier, Backward | FormatError]:
    """The link of each function that has one, read once, or what is wrong with it."""
    found: dict[ir.OperatorIdentifier, Backward | FormatError] = {}
    for key, function in model.functions.items():
        try:
            if (link := backward_of(model, function)) is not None:
                found[key] = link
        except FormatError as error:
            found[key] = error
    return found


def _portable_row(
    model: ir.Model, links: Mapping[ir.OperatorIdentifier, Backward | FormatError], graph: str, node: ir.Node, named: bool
) -> CallFacts:
    """A call of an ONNX function: what it keeps for its backward is no output of the Function."""
    function, link = model.functions[node.op_identifier()], links[node.op_identifier()]
    outputs = list(node.outputs)
    if not isinstance(link, FormatError):  # the row of the link says it
        outputs = outputs[: len(function.outputs) - len(link.kept)]
    return CallFacts(
        function.metadata_props.get(FUNCTION_KEY, f"{function.domain}::{function.name}"),
        node.name or "",
        graph,
        arguments=_names(node.inputs, named),
        inputs=[tensor_text(value) for value in node.inputs],
        outputs=[tensor_text(value) for value in outputs],
        module=node.metadata_props.get(MODULE_PROPERTY, ""),
        source=node.metadata_props.get(SOURCE_PROPERTY, ""),
        kind="function",
    )


def _link(function: ir.Function, link: Backward | FormatError) -> LinkFacts:
    facts = LinkFacts(f"{function.domain}::{function.name}", function.metadata_props.get(FUNCTION_KEY, ""))
    if isinstance(link, FormatError):
        facts.error = str(link)
    elif link.name:
        facts.backward, facts.once = f"{link.domain}::{link.name}", link.once
    return facts


def _decode(values: dict[str, Any]) -> AutogradCall:
    try:
        return read_attributes(values)
    except FormatError as error:
        if "unknown type" not in str(error):
            raise
        # Types of torch have names that only torch knows. Where it is missing, the error says so.
        try:
            import symbolics.node.torch_arguments  # noqa: F401
        except ImportError:
            raise error from None
        return read_attributes(values)


def _fill_from_call(row: CallFacts, node: ir.Node, call: AutogradCall, named: bool) -> None:
    names = _names(node.inputs, named)
    row.id = call.id
    row.arguments = [_text(value, names) for value in call.args]
    row.arguments += [f"{key}={_text(value, names)}" for key, value in call.kwargs.items()]
    row.settings = list(settings_in(call.module.tree)) if call.module is not None else []
    row.inputs = _tensors(list(node.inputs), call.input_types, call.input_ranks, call.input_requires_grads)
    row.outputs = _tensors(_outputs(node), call.output_types, call.output_ranks, call.output_requires_grads)
    flags = {"training": call.training, "inplace": call.inplace, "context": _has_context(node)}
    row.flags = [name for name, on in flags.items() if on]
    row.flags += [f"autocast={','.join(f'{d}:{t}' for d, t in call.autocast.dtypes.items())}"] if call.autocast.dtypes else []
    row.flags += [f"passed={call.passed}"] if call.passed is not None else []


def _fill_from_attributes(row: CallFacts, node: ir.Node, values: dict[str, Any], named: bool) -> None:
    """A node without ``call``: of a dialect, or of somebody else's making."""
    convention = str(values.get("input_convention", ""))
    found: dict[int, str] = {}
    for family in ("bool", "int", "float", "pointer"):
        prefix = f"input_{family}_scalar"
        for position, value in zip(values.get(f"{prefix}_positions", ()), values.get(f"{prefix}s", ()), strict=False):
            found[position] = "<address>" if family == "pointer" else repr(bool(value) if family == "bool" else value)
        prefix = f"input_{family}_tuple"
        if family == "pointer":
            continue
        for position, items in zip(values.get(f"{prefix}_positions", ()), tuples_of(values, prefix), strict=False):
            found[position] = repr(tuple(map(bool, items)) if family == "bool" else items)
    names = iter(_names(node.inputs, named))
    row.arguments = [next(names, "?") if letter == "d" else found.get(i, "?") for i, letter in enumerate(convention)]
    flags = values.get("input_requires_grads", [])
    needed = [bool(flag) for flag, letter in zip(flags, convention, strict=False) if letter == "d"]
    row.inputs = _tensors(list(node.inputs), values.get("input_tensor_types", ()), values.get("input_tensor_ranks", ()), needed)
    row.outputs = _tensors(
        _outputs(node),
        values.get("output_tensor_types", ()),
        values.get("output_tensor_ranks", ()),
        values.get("output_tensor_requires_grads", ()),
    )
    row.flags = [flag for flag, key in (("training", "training_mode"), ("inplace", "inplace")) if values.get(key)]
    row.flags += ["context"] if _has_context(node) else []
    row.flags.append("no call")


def _outputs(node: ir.Node) -> list[ir.Value | None]:
    """The tensor outputs of a call, which stand behind the context."""
    return list(node.outputs[is_python_op(node) :])


def _has_context(node: ir.Node) -> bool:
    return is_python_op(node) and bool(node.outputs and node.outputs[0].name)


def _tensors(values: list[ir.Value | None], kinds: Any, ranks: Any, flags: Any) -> list[str]:
    out = []
    for i, (kind, rank) in enumerate(zip(kinds, ranks, strict=False)):
        value = values[i] if i < len(values) else None
        dims = _dims(value.shape) if value is not None and value.shape is not None else ["?"] * rank
        out.append(f"{ir.DataType(kind).name.lower()}[{', '.join(dims)}]{'*' if i < len(flags) and flags[i] else ''}")
    return out


def _dims(shape: ir.Shape | ir.ShapeProtocol) -> list[str]:
    return [
        "?" if isinstance(d, ir.SymbolicDim) and d.value is None else str(d.value if isinstance(d, ir.SymbolicDim) else d) for d in shape
    ]


def _text(value: Any, names: list[str]) -> str:
    """An argument as Python would write it, tensors by the names of their values."""
    if isinstance(value, Slot):
        name = names[value.index] if value.index < len(names) else "?"
        return f"int({name})" if value.kind == "size" else name
    if isinstance(value, Unresolved):
        return value.text
    if isinstance(value, np.ndarray):
        return f"ndarray({value.dtype}, shape={value.shape})"
    if isinstance(value, Described):
        fields = [f"{field}=" for field in value.fields] if value.fields is not None else [""] * len(value)
        return f"{value.name}({', '.join(f'{field}{_text(item, names)}' for field, item in zip(fields, value, strict=True))})"
    if isinstance(value, Partial):
        return f"Size([{', '.join(_text(item, names) for item in value)}])"
    if type(value) is list:
        return f"[{', '.join(_text(item, names) for item in value)}]"
    if type(value) is tuple:
        return f"({', '.join(_text(item, names) for item in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(k, names)}: {_text(v, names)}' for k, v in value.items())}}}"
    return repr(value)
