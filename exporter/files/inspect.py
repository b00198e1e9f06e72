"""What a file says about its PythonOps: for `pythonop inspect` and for programs.

Nothing of the file runs, no name in it is imported, and no torch is needed. Every text of the file is shown without
control characters and without markup.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from symbolics.errors import FormatError
from symbolics.node.arguments import Described, Unresolved
from symbolics.node.attributes import read_attributes, values_of
from symbolics.node.call import AutogradCall
from symbolics.node.containers import Partial, Slot
from symbolics.node.metadata import StateEntry, StepLayout, check_version, read_pairing, read_state, read_step
from symbolics.node.names import (
    CALL_ATTRIBUTE,
    GRADIENTS_KEY,
    MARK_COUNT_KEY,
    MARK_DOMAIN,
    MARK_OP,
    MODULE_PROPERTY,
    ORT_DOMAIN,
    PYTHON_OP,
    PYTHON_OP_GRAD,
    SOURCE_PROPERTY,
    UNCHECKED_KEY,
)
from symbolics.node.text import clean

__all__ = ["Report", "Row", "inspect_file", "inspect_model", "read_model", "render"]


@dataclass
class Row:
    """One PythonOp.

    Attributes:
        function: ``module:qualname``.
        node, graph: Its name, and where it stands: "" for the main graph.
        arguments: Text of each argument of forward, tensors by the names of their values; keywords as ``name=``.
        inputs, outputs: ``float32[2, N]`` a tensor, with a trailing ``*`` where it needs (or has) a gradient.
        flags: What is set of: training, inplace, context, autocast=..., passed=...
        module, source: Where the call came from, "" where the file does not say.
        id: The call's id, None for a node without ``call``.
        backward: The PythonOpGrads of this call: the node and the inputs it gives gradients of.
        error: What is wrong with it, None for nothing.
    """

    function: str
    node: str
    graph: str
    arguments: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    module: str = ""
    source: str = ""
    id: str | None = None
    backward: list[str] = field(default_factory=list)
    error: str | None = None


@dataclass
class Report:
    """A file.

    Attributes:
        format_version: Of docs/format.md; None for a file that pythonop did not write.
        ir_version, opsets: Of ONNX.
        stop_gradients, stop_gradients_recorded: How many marks the graph has, how many the metadata says.
        gradients: How many PythonOpGrads the file has.
        training: Whether the file pairs values with their gradients.
        parameters, trainable, frozen, buffers, not_persistent: How many names of each.
        tied: Names that share an initializer, a list a group.
        rows: Its PythonOps, subgraphs and functions included.
        step: What the inputs and outputs of a training step are; None for any other file.
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
    rows: list[Row]
    step: StepLayout | None = None
    unchecked: str = ""

    def as_json(self) -> dict[str, Any]:
        """The same as plain dicts and lists."""
        return dataclasses.asdict(self)


# ------------------------------------------------------------------------------------------------------------ reading


def read_model(path: str | os.PathLike[str]) -> ir.Model:
    """The ONNX model of a file, without the data of external tensors.

    Raises:
        FormatError: The file cannot be read, is cut off, or is no ONNX model.
    """
    shown = clean(os.fspath(path))
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise FormatError(f"cannot read {shown}: {error.strerror or error}") from error
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
        # Protobuf reads many things without complaint: an empty file, and some text.
        if not proto.ir_version or not proto.HasField("graph") or not proto.opset_import:
            raise DecodeError("it has no graph")
        return ir.from_proto(proto)
    except Exception as error:
        # onnx_ir raises whatever its parts raise: to the reader it is one thing.
        raise FormatError(
            f"{shown} is no ONNX model, or it is cut off ({clean(str(error).splitlines()[0] if str(error) else type(error).__name__)})"
        ) from error


def inspect_file(path: str | os.PathLike[str]) -> Report:
    """What a file says.

    Raises:
        FormatError: The file cannot be read, is no ONNX model, or its metadata is damaged or of a newer format. A
            damaged node is no error: its row says what is wrong.
    """
    return inspect_model(read_model(path))


def inspect_model(model: ir.Model) -> Report:
    """The same for a model in memory.

    Raises:
        FormatError: The metadata is damaged or of a newer format.
    """
    metadata = model.metadata_props
    state = read_state(metadata) or {}
    places = list(_places(model))
    kinds = [entry.kind for entry in state.values()]
    backward = _backward(places)
    recorded = metadata.get(MARK_COUNT_KEY, "")
    read_pairing(metadata)  # a damaged one is an error here, too
    return Report(
        format_version=check_version(metadata),
        ir_version=int(model.ir_version or 0),
        opsets=dict(model.opset_imports),
        stop_gradients=sum((node.domain, node.op_type) == (MARK_DOMAIN, MARK_OP) for _, node in places),
        stop_gradients_recorded=int(recorded) if recorded.isascii() and recorded.isdigit() and len(recorded) < 10 else None,
        gradients=sum((node.domain, node.op_type) == (ORT_DOMAIN, PYTHON_OP_GRAD) for _, node in places),
        training=GRADIENTS_KEY in metadata,
        parameters=kinds.count("parameter"),
        trainable=sum(entry.trainable for entry in state.values()),
        frozen=sum(entry.kind == "parameter" and not entry.trainable for entry in state.values()),
        buffers=kinds.count("buffer"),
        not_persistent=sum(not entry.persistent for entry in state.values()),
        tied=_tied(state),
        rows=[_row(graph, node, backward) for graph, node in places if (node.domain, node.op_type) == (ORT_DOMAIN, PYTHON_OP)],
        step=read_step(metadata),
        unchecked=clean(metadata.get(UNCHECKED_KEY, "")),
    )


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
    """The PythonOpGrads by what they share with their PythonOp: its context, or, where contexts left a loop, its call."""
    found: dict[Any, list[ir.Node]] = {}
    for _, node in places:
        if (node.domain, node.op_type) == (ORT_DOMAIN, PYTHON_OP_GRAD) and node.inputs:
            found.setdefault(_pair_key(node, node.inputs[0]), []).append(node)
    return found


def _pair_key(node: ir.Node, context: ir.Value | None) -> Any:
    call = node.attributes.get(CALL_ATTRIBUTE)
    if call is not None and not call.is_ref() and call.type is ir.AttributeType.STRING:
        return call.value
    return id(context)


def _row(graph: str, node: ir.Node, backward: dict[Any, list[ir.Node]]) -> Row:
    row = Row(
        "?",
        node.name or "",
        graph,
        module=node.metadata_props.get(MODULE_PROPERTY, ""),
        source=node.metadata_props.get(SOURCE_PROPERTY, ""),
    )
    try:
        values = values_of(node)
        row.function = str(values.get("name", values.get("func_name", "?")))
        if CALL_ATTRIBUTE in values:
            _fill_from_call(row, node, _decode(values))
        else:
            _fill_from_attributes(row, node, values)
    except FormatError as error:
        row.error = str(error)
    for grad in backward.get(_pair_key(node, node.outputs[0] if node.outputs else None), []):
        given = [source.name or "" for source, output in zip(node.inputs, grad.outputs, strict=False) if source is not None and output.name]
        row.backward.append(f"{grad.name or PYTHON_OP_GRAD}: {', '.join(given) or 'nothing'}")
    return row


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


def _fill_from_call(row: Row, node: ir.Node, call: AutogradCall) -> None:
    names = [value.name or "" if value is not None else "" for value in node.inputs]
    row.id = call.id
    row.arguments = [_text(value, names) for value in call.args]
    row.arguments += [f"{key}={_text(value, names)}" for key, value in call.kwargs.items()]
    row.inputs = _tensors(list(node.inputs), call.input_types, call.input_ranks, call.input_requires_grads)
    row.outputs = _tensors(list(node.outputs[1:]), call.output_types, call.output_ranks, call.output_requires_grads)
    flags = {"training": call.training, "inplace": call.inplace, "context": bool(node.outputs and node.outputs[0].name)}
    row.flags = [name for name, on in flags.items() if on]
    row.flags += [f"autocast={','.join(f'{d}:{t}' for d, t in call.autocast.dtypes.items())}"] if call.autocast.dtypes else []
    row.flags += [f"passed={call.passed}"] if call.passed is not None else []


def _fill_from_attributes(row: Row, node: ir.Node, values: dict[str, Any]) -> None:
    """A node without ``call``: of a dialect, or of somebody else's making."""
    convention = str(values.get("input_convention", ""))
    found: dict[int, str] = {}
    for family in ("bool", "int", "float", "pointer"):
        prefix = f"input_{family}_scalar"
        for position, value in zip(values.get(f"{prefix}_positions", ()), values.get(f"{prefix}s", ()), strict=False):
            found[position] = "<address>" if family == "pointer" else repr(bool(value) if family == "bool" else value)
        prefix = f"input_{family}_tuple"
        begins, items = values.get(f"{prefix}_begins", []), values.get(f"{prefix}s", [])
        ends = [*begins[1:], len(items)] if begins else []
        for position, begin, end in zip(values.get(f"{prefix}_positions", ()), begins, ends, strict=False):
            found[position] = repr(tuple(map(bool, items[begin:end])) if family == "bool" else tuple(items[begin:end]))
    names = iter(value.name or "" if value is not None else "" for value in node.inputs)
    row.arguments = [next(names, "?") if letter == "d" else found.get(i, "?") for i, letter in enumerate(convention)]
    flags = values.get("input_requires_grads", [])
    needed = [bool(flag) for flag, letter in zip(flags, convention, strict=False) if letter == "d"]
    row.inputs = _tensors(list(node.inputs), values.get("input_tensor_types", ()), values.get("input_tensor_ranks", ()), needed)
    row.outputs = _tensors(
        list(node.outputs[1:]),
        values.get("output_tensor_types", ()),
        values.get("output_tensor_ranks", ()),
        values.get("output_tensor_requires_grads", ()),
    )
    row.flags = [flag for flag, key in (("training", "training_mode"), ("inplace", "inplace")) if values.get(key)]
    row.flags += ["context"] if node.outputs and node.outputs[0].name else []
    row.flags.append("no call")


def _tensors(values: list[ir.Value | None], kinds: Any, ranks: Any, flags: Any) -> list[str]:
    out = []
    for i, (kind, rank) in enumerate(zip(kinds, ranks, strict=False)):
        value = values[i] if i < len(values) else None
        if value is not None and value.shape is not None:
            dims = [
                "?" if isinstance(d, ir.SymbolicDim) and d.value is None else str(d.value if isinstance(d, ir.SymbolicDim) else d)
                for d in value.shape
            ]
        else:
            dims = ["?"] * min(max(rank, 0), 64)
        try:
            name = ir.DataType(kind).name.lower()
        except ValueError:
            name = f"type {kind}"
        out.append(f"{name}[{', '.join(dims)}]{'*' if i < len(flags) and flags[i] else ''}")
    return out


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


# ------------------------------------------------------------------------------------------------------------ showing


def render(report: Report, title: str = "") -> RenderableType:
    """The report for a terminal. Texts of the file are rich Texts: markup in them is not read."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    for name, text in _facts(report):
        facts.add_row(Text(name), Text(clean(text, 2000)))
    parts: list[RenderableType] = [Text(clean(title), style="bold")] if title else []
    parts.append(facts)
    if report.rows:
        table = Table(show_lines=False, pad_edge=False)
        paired = [("Backward: gradients of", lambda row: _lines(row.backward))] if report.gradients else []
        for column in ("#", "Function", "Arguments", "Inputs", "Outputs", *(name for name, _ in paired), "Flags", "Where"):
            table.add_column(column, overflow="fold")
        for index, row in enumerate(report.rows):
            where = [clean(text) for text in (row.graph, row.module, row.source) if text]
            arguments = Text(f"damaged: {clean(row.error, 400)}", style="red") if row.error is not None else _lines(row.arguments)
            table.add_row(
                str(index),
                Text(clean(row.function)),
                arguments,
                _lines(row.inputs),
                _lines(row.outputs),
                *(text(row) for _, text in paired),
                _lines(row.flags),
                _lines(where),
            )
        parts.append(table)
        parts.append(Text("* needs (has) a gradient", style="dim"))
    else:
        parts.append(Text("no PythonOp"))
    return Group(*parts)


def _lines(texts: list[str]) -> Text:
    return Text("\n".join(clean(text, 120) for text in texts))


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    version = report.format_version
    yield "format", f"pythonop {version}" if version is not None else "not written by pythonop"
    yield "ONNX", f"IR {report.ir_version}, " + ", ".join(f"{domain or 'ai.onnx'} {number}" for domain, number in report.opsets.items())
    yield "calls", f"{len(report.rows)} PythonOp, {report.gradients} PythonOpGrad{', gradients paired' if report.training else ''}"
    if report.unchecked:
        yield "not checked", f"against the Functions of an eager run: {report.unchecked}"
    recorded = report.stop_gradients_recorded
    lost = (
        ""
        if recorded in (None, report.stop_gradients)
        else f" (the metadata says {recorded}: an optimizer removed some, gradients of this file would be wrong)"
    )
    yield "stop-gradient marks", f"{report.stop_gradients}{lost}"
    if (step := report.step) is not None:
        yield (
            "training step",
            f"{step.optimizer}: takes {', '.join((*step.inputs, *step.targets))}; trains {len(step.parameters)} parameters, updates {len(step.buffers)} buffers",
        )
        if step.untrained:
            yield "untrained", ", ".join(step.untrained)
    if version is not None:
        yield "parameters", f"{report.parameters}, {report.trainable} trainable, {report.frozen} frozen"
        yield "buffers", f"{report.buffers}, {report.not_persistent} not in state_dict()"
    for group in report.tied:
        yield "tied", " = ".join(group)
