"""The PythonOp dialects of other readers: the documented schema, and what released training builds accept.

They have no ``call``: what only ``call`` says is lost, and each loss is a warning that names Function and argument.
docs/format.md has the table. No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from symbolics.errors import ExportError, FormatError
from symbolics.node.arguments import Described
from symbolics.node.attributes import BOOL_FAMILIES, GRAD_SPECS, check_types, family_of, read_attributes, typed_attributes, values_of
from symbolics.node.backward import is_backward
from symbolics.node.call import AutogradCall
from symbolics.node.containers import Partial, Slot, slots
from symbolics.node.names import CALL_ATTRIBUTE, ORT_DOMAIN, OWN_DOMAIN, PYTHON_OP, PYTHON_OP_BACKWARD, PYTHON_OP_GRAD, PYTHON_OP_TANGENT
from symbolics.text import shown
from symbolics.users import warn

__all__ = ["DIALECTS", "Dialect", "to_dialect"]


@dataclass(frozen=True)
class Dialect:
    """How a reader differs from the documented schema.

    Attributes:
        without: Attributes of PythonOp that it refuses.
        grad_without: Attributes of PythonOpGrad that it refuses.
        renamed: Attribute -> its name there, on both operators.
        bools: Whether bools have attributes of their own (input_bool_scalars, input_bool_tuples).
        max_ir_version: The newest ONNX IR version that it loads, None where no release is meant.
        max_opset: The newest opset of the default domain that it loads.
    """

    without: frozenset[str] = frozenset()
    grad_without: frozenset[str] = frozenset()
    renamed: tuple[tuple[str, str], ...] = ()
    bools: bool = False
    max_ir_version: int | None = None
    max_opset: int | None = None


_FLAGS = frozenset({"output_tensor_requires_grads"})
_GRAD_FLAGS = frozenset({"input_tensor_requires_grads"})
_FUNC_NAME = (("name", "func_name"),)

DIALECTS: dict[str, Dialect] = {
    "documented": Dialect(),
    "ort-1.15": Dialect(_FLAGS, _GRAD_FLAGS, max_ir_version=9, max_opset=19),
    "ort-1.16": Dialect(_FLAGS, _GRAD_FLAGS, _FUNC_NAME, bools=True, max_ir_version=9, max_opset=19),
    "ort-1.17": Dialect(_FLAGS | {"inplace"}, _GRAD_FLAGS | {"inplace"}, _FUNC_NAME, bools=True, max_ir_version=9, max_opset=20),
}


def to_dialect(model: ir.Model, schema: str) -> ir.Model:
    """A copy of a model whose PythonOps and PythonOpGrads are written as another reader expects them.

    Stop-gradient marks, metadata and everything else stay. Context outputs get names: these readers require them.

    Args:
        model: A finished model.
        schema: A key of `DIALECTS`.

    Raises:
        ExportError: There is no such dialect, or it cannot say a node at all (no tensor input or output, a second derivative, a tangent).
        FormatError: A PythonOp of the model is damaged.

    Warns:
        PythonopWarning: Something is lost; the message names Function, argument and remedy.
    """
    if schema not in DIALECTS:
        raise ExportError(f"there is no schema dialect {shown(str(schema))!r}: known are {', '.join(DIALECTS)}")
    dialect = DIALECTS[schema]
    try:
        out = model.clone()
    except Exception as error:  # onnx_ir raises whatever its parts raise
        raise FormatError("the model cannot be copied: a node of it reads a value that nothing makes, or a tensor is damaged") from error
    writer = _Writer(schema, dialect, _value_names(out))
    for graph in _graphs(out):
        for node in ir.traversal.RecursiveGraphIterator(graph):
            if node.domain == ORT_DOMAIN and node.op_type == PYTHON_OP:
                writer.forward(node)
            elif node.domain == ORT_DOMAIN and node.op_type == PYTHON_OP_GRAD:
                writer.backward(node)
            elif is_backward(node):
                raise ExportError(
                    f"the node {shown(node.name or '')!r} is a {PYTHON_OP_BACKWARD}, which schema={schema!r} cannot say: those readers have no "
                    "gradients of gradients; save without schema=, or save the file of the first order"
                )
            elif node.domain == OWN_DOMAIN and node.op_type == PYTHON_OP_TANGENT:
                raise ExportError(
                    f"the node {shown(node.name or '')!r} is a {PYTHON_OP_TANGENT}, which schema={schema!r} cannot say: those readers have no "
                    "forward-mode derivative; save without schema=, or save the file that build_tangent_graph was given"
                )
    _fit_versions(out, schema, dialect)
    writer.warn()
    return out


def _graphs(model: ir.Model) -> list[ir.Graph | ir.Function]:
    return [model.graph, *model.functions.values()]


def _value_names(model: ir.Model) -> set[str]:
    names: set[str] = set()
    for graph in _graphs(model):
        names.update(value.name or "" for value in graph.inputs)
        for node in ir.traversal.RecursiveGraphIterator(graph):
            names.update(value.name or "" for value in (*node.outputs, *node.inputs) if value is not None)
    return names | set(model.graph.initializers)


def _fit_versions(model: ir.Model, schema: str, dialect: Dialect) -> None:
    if dialect.max_ir_version is not None and (model.ir_version or 0) > dialect.max_ir_version:
        model.ir_version = dialect.max_ir_version
    opset = model.opset_imports.get("")
    if dialect.max_opset is not None and opset is not None and opset > dialect.max_opset:
        warn(
            f"schema={schema!r}: the model has opset {opset}, that release knows opsets up to {dialect.max_opset} and may refuse it: "
            f"export with opset_version={dialect.max_opset}."
        )


class _Writer:
    """Rewrites the nodes of one model and collects what is lost."""

    def __init__(self, schema: str, dialect: Dialect, names: set[str]) -> None:
        self.schema = schema
        self.dialect = dialect
        self.names = names
        self.losses: Counter[str] = Counter()

    def warn(self) -> None:
        """One warning per loss; a loss that several calls share is said once."""
        for loss, count in self.losses.items():
            calls = f" ({count} calls)" if count > 1 else ""
            warn(f"schema={self.schema!r}: {loss}{calls}. A file saved without schema= keeps it.")

    # ------------------------------------------------------------------------------------------------- PythonOp

    def forward(self, node: ir.Node) -> None:
        """Rewrite a PythonOp."""
        values = values_of(node)
        call = read_attributes(values)
        name = shown(call.name)
        if not call.input_types:
            raise ExportError(
                f"{name} has no tensor argument, which schema={self.schema!r} cannot say: save without schema=, or pass it a tensor"
            )
        if not call.output_types:
            raise ExportError(
                f"{name} returns no tensor, which schema={self.schema!r} cannot say: save without schema=, or let it return one"
            )
        if CALL_ATTRIBUTE in values:
            self.losses.update(f"{name}, {loss}" for loss in _losses(call, self.dialect))
        if call.inplace and "inplace" in self.dialect.without:
            self.losses[f"{name}: inplace has no place there, the reader may reuse the memory of the input"] += 1
        if self.dialect.bools:
            for name in [name for name in node.attributes if name.startswith("input_int_")]:
                del node.attributes[name]
            for name, items in typed_attributes(call, BOOL_FAMILIES).items():
                if name.startswith(("input_int_", "input_bool_")):
                    node.attributes.add(ir.Attr(name, ir.AttributeType.INTS, items))
        self._rewrite(node, self.dialect.without)
        context = node.outputs[0]
        if not context.name:
            context.name = self._fresh(f"{node.name or PYTHON_OP}_context")
        context.type, context.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([])

    def _fresh(self, base: str) -> str:
        name, count = base, 0
        while name in self.names:
            count += 1
            name = f"{base}_{count}"
        self.names.add(name)
        return name

    # --------------------------------------------------------------------------------------------- PythonOpGrad

    def backward(self, node: ir.Node) -> None:
        """Rewrite a PythonOpGrad; the builds infer its outputs from the four type attributes, so it gets them."""
        values = values_of(node)
        check_types(values, GRAD_SPECS, PYTHON_OP_GRAD)
        count = (len(node.inputs) - 1) // 2
        for prefix, places in (("input", node.inputs[1 : 1 + count]), ("output", node.outputs)):
            for what, read in (("types", _element_type), ("ranks", _rank)):
                attribute = f"{prefix}_tensor_{what}"
                if attribute not in values:
                    node.attributes[attribute] = ir.Attr(
                        attribute, ir.AttributeType.INTS, [self._known(node, read, place) for place in places]
                    )
        self._rewrite(node, self.dialect.grad_without)

    def _known(self, node: ir.Node, read: Callable[[ir.Value], int | None], place: ir.Value | None) -> int:
        found = read(place) if place is not None else None
        if found is None:
            raise ExportError(
                f"the PythonOpGrad {shown(node.name or '')!r} lacks its tensor types and ranks and the graph does not say them, "
                f"schema={self.schema!r} needs them: build the gradient graph again with pythonop"
            )
        return found

    def _rewrite(self, node: ir.Node, without: frozenset[str]) -> None:
        for refused in (CALL_ATTRIBUTE, *without):
            node.attributes.pop(refused, None)
        for old, new in self.dialect.renamed:
            attribute = node.attributes.pop(old)
            rest = list(node.attributes.values())
            node.attributes.clear()
            node.attributes.add(ir.Attr(new, attribute.type, attribute.value))
            for other in rest:
                node.attributes.add(other)


def _element_type(value: ir.Value) -> int | None:
    return int(value.dtype) if value.dtype is not None else None


def _rank(value: ir.Value) -> int | None:
    return len(value.shape) if value.shape is not None else None


# ------------------------------------------------------------------------------------------------------------- losses


def _losses(call: AutogradCall, dialect: Dialect) -> Iterator[str]:
    """What of a call the attributes of a dialect do not say."""
    for index, value in enumerate(call.args):
        yield from _argument_losses(f"argument {index}", value, dialect)
    for key, value in call.kwargs.items():
        place = f"keyword argument {shown(key)!r}"
        yield f"{place}: it is handed over by position, its name is lost"
        yield from _argument_losses(place, value, dialect)
    if call.passed is not None and call.passed != len(call.args):
        yield f"arguments {call.passed} to {len(call.args) - 1}: they are defaults of forward and will be passed, so backward must answer for them"
    yield from _output_losses(call)
    if call.autocast.dtypes:
        yield f"autocast: it ran under autocast to {', '.join(call.autocast.dtypes.values())}, the reader will not"


def _argument_losses(place: str, value: Any, dialect: Dialect) -> Iterator[str]:
    kind = type(value).__name__
    inside = slots(value)
    if isinstance(value, Slot):
        if value.kind == "size":
            yield f"{place}: a size of a dynamic dimension is handed over as an int64 tensor, not as an int"
        return
    if inside:
        kind = shown(value.name) if isinstance(value, Described) else "torch.Size" if isinstance(value, Partial) else kind
        yield f"{place}: a value of type {kind} that holds tensors or sizes is taken apart, its parts are handed over as arguments of their own"
        return
    if isinstance(value, Described):
        kind = shown(value.name)
    prefix = family_of(value)
    if prefix == "input_pointer_scalar":
        yield f"{place}: a value of type {kind} can only be written as an address, 0 stands in its place"
    elif "float" in prefix:
        items = value if isinstance(value, tuple) else (value,)
        lost = [item for item in items if item == item and float(np.float32(item)) != item]
        if lost:
            yield f"{place}: {', '.join(map(repr, lost[:3]))} is rounded to float32"
    elif "int" in prefix:
        items = value if isinstance(value, tuple) else (value,)
        bools = [item for item in items if type(item) is bool]
        if bools and not (dialect.bools and len(bools) == len(items)):
            yield f"{place}: a bool is written as the int {int(bools[0])}"


def _output_losses(call: AutogradCall) -> Iterator[str]:
    outputs = call.outputs
    if isinstance(outputs, Slot):
        return
    if type(outputs) is not tuple:
        yield f"its output, of type {type(outputs).__name__}, is taken apart, its tensors are outputs of their own"
        return
    for index, item in enumerate(outputs):
        if not isinstance(item, Slot):
            yield f"output {index}, of type {type(item).__name__}, is no tensor and is left out"
