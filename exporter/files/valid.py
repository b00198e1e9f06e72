"""Whether a model is valid ONNX: onnx.checker, with its inference of types and shapes, on all but the values of large weights."""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx
import onnx_ir as ir

import symbolics.node.schema  # noqa: F401  (the checker knows the operators of ours from there)
from exporter.files.places import Places
from exporter.files.read import check_order
from exporter.files.skeleton import skeleton
from symbolics.errors import ExportError, FormatError
from symbolics.graph.values import function_of, is_python_op
from symbolics.graph.walk import walk
from symbolics.node.names import MODULE_PROPERTY, SOURCE_PROPERTY
from symbolics.text import clean, reason, shown

__all__ = ["check_halves", "check_valid", "invalid", "node_in"]

#: From this opset on, most operators of floating point numbers take bfloat16.
_ALL_HALVES = 22
_BFLOAT16 = "tensor(bfloat16)"

#: How onnx.checker, ONNX's inference and onnxruntime name a node.
_NAMED = (
    r"node name: ([^)\n]+)\)",
    r"Name: (\S+) OpType:",
    r"in node \(([^)\n]*)\)",
    r"node with name '([^']+)'",
    r"Node \(([^)\n]+)\)",
    r"Node:([^ \n]+) ",
    r"node \[([^\]\n]+)\]",
)


def check_valid(model: ir.Model) -> onnx.ModelProto:
    """Refuse a model that is not valid ONNX; weights of more than 256 elements are not looked into, so that it takes milliseconds.

    Returns:
        What was checked: the model with inputs in the place of those weights.

    Raises:
        ExportError: onnx.checker (``full_check=True``) refuses it; the message names the node.
    """
    for kind, values in (("input", model.graph.inputs), ("output", model.graph.outputs)):
        for value in values:
            if value.type is None or (isinstance(value.type, ir.TensorType) and value.shape is None):
                what = "type" if value.type is None else "shape, not even a rank"
                maker = value.producer()
                raise ExportError(
                    f"the model is not valid ONNX: its {kind} {shown(value.name or '')!r} has no {what}{'' if maker is None else _line(model, maker)}"
                )
    return _checked(model)


def invalid(model: ir.Model) -> str:
    """What onnx.checker says of a model that is not valid ONNX, in one line; "" of one that is. Outputs without a shape are valid here."""
    opset, newest = model.opset_imports.get("", 1), onnx.defs.onnx_opset_version()
    if not 1 <= opset <= newest:  # the checker takes the newest operators that it knows
        return f"the model has opset {opset}: onnx {onnx.__version__} knows 1 to {newest}"
    try:
        _checked(model)
    except ExportError as error:
        return " ".join(str(error).split())
    return ""


def _checked(model: ir.Model) -> onnx.ModelProto:
    try:
        copied = model.clone()  # another thread may read the model
    except (RuntimeError, ValueError) as error:
        try:
            check_order(model)
        except FormatError as unordered:
            raise ExportError(f"the model is not valid ONNX: {unordered}") from error
        raise ExportError(f"the model is not valid ONNX: {reason(error)}") from error
    proto = skeleton(copied)
    try:
        onnx.checker.check_model(proto.SerializeToString(), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        text = str(error)
        raise ExportError(
            f"the model is not valid ONNX, as onnx.checker says: {clean(' '.join(text.split()), 500)}{node_in(model, text)}{_other_opset(model, text)}"
        ) from error
    return proto


def check_halves(model: ir.Model) -> None:
    """Refuse a model that has an operator of bfloat16 in an opset whose operator takes none: many do from opset 22 on.

    Raises:
        ExportError: As `check_valid`; of what else is not valid, nothing is said here.
    """
    values = (value for node in walk(model.graph) for value in (*node.inputs, *node.outputs) if value is not None)
    if model.opset_imports.get("", _ALL_HALVES) < _ALL_HALVES and any(value.dtype is ir.DataType.BFLOAT16 for value in values):
        try:
            check_valid(model)
        except ExportError as error:
            if _BFLOAT16 in str(error):
                raise


def _other_opset(model: ir.Model, text: str) -> str:
    """The way out where an operator takes no bfloat16, and does in a newer opset; "" for what else is wrong."""
    *_, kind = "", *re.findall(r"op_type: ?(\w+)", text)  # the innermost, of what is in bodies
    if _BFLOAT16 not in text or not onnx.defs.has(kind):
        return ""
    found = onnx.defs.get_schema(kind, max(_ALL_HALVES, model.opset_imports.get("", 0)))
    if any(_BFLOAT16 in constraint.allowed_type_strs for constraint in found.type_constraints):
        return f"\n  way out: opset_version={_ALL_HALVES}, from which on {kind} takes bfloat16"
    return f"\n  way out: compute it in float32 (x.float()): no {kind} of ONNX takes bfloat16"


def node_in(model: ir.Model, text: str) -> str:
    """A line about the node that a text of onnx.checker or onnxruntime names, with the Function that it calls and the line of the model that
    it comes from; "" where it names none.
    """
    named = {name for pattern in _NAMED for name in re.findall(pattern, text)}
    node = next((node for node in _nodes(model) if node.name in named), None) if named else None
    return "" if node is None else _line(model, node)


def _line(model: ir.Model, node: ir.Node) -> str:
    name = function_of(node) if is_python_op(node) else ""
    function = f" ({shown(name)})" if name else ""
    module = node.metadata_props.get(MODULE_PROPERTY) or (Places(model).module(node) if node.graph is model.graph else "")
    source = node.metadata_props.get(SOURCE_PROPERTY) or _source(node.metadata_props.get(_STACK, ""))
    places = [f"in module {shown(module)}"] * bool(module) + [f"at {shown(source)}"] * bool(source)
    return f"\n  node: {shown(node.op_type)}{function} {shown(node.name or '')!r}{', ' if places else ''}{', '.join(places)}"


#: Where torch.export writes the lines that a node comes from.
_STACK = "pkg.torch.onnx.stack_trace"


def _source(stack: str) -> str:
    """The innermost line that is not torch's."""
    for file, line in reversed(re.findall(r'File "([^"\n]+)", line (\d+)', stack[:10_000])):
        path = re.split(r"[/\\]", file)
        if "torch" not in path:
            return f"{path[-1]}:{line}"
    return ""


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from walk(model.graph)
    for function in model.functions.values():
        yield from walk(function)
