"""What is known of a node or a value, and how messages name it."""

from __future__ import annotations

import ast
import functools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from symbolics.errors import Faq, FormatError, UnsupportedOperatorError
from symbolics.node.limits import MAX_UNROLLED
from symbolics.node.names import MARK_DOMAIN, MARK_OP, ORT_DOMAIN, OWN_DOMAIN, PYTHON_OP, PYTHON_OP_TANGENT
from symbolics.text import shown

__all__ = [
    "HALVES", "RANDOM", "SCOPES", "array_of", "attr", "check_unrolled", "constant_of", "describe", "dtype_of", "fixed_array", "function_of", "graph_of", "input_of", "is_float", "is_float_tensor", "is_mark", "is_python_op", "is_python_op_tangent", "is_static", "made_by", "may_be_float", "name_of", "operator_text",
    "rank_of", "schema_default", "scope_of", "shape_in_function", "static_shape", "trains", "unknown_because", "unsupported",
]  # fmt: skip

#: The types of 16 bits: torch's kernels compute inside in float32.
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
#: Operators that may draw random numbers: two are never one, none is computed beforehand. (A Dropout draws where it `trains`.)
RANDOM = frozenset("Bernoulli Dropout Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike".split())

_STANDARD = ("", "ai.onnx")
_OLDEST = 18  # the oldest opset of a model that has gradients: older ones are converted
_SCHEMA = object()
#: Metadata that torch's exporter writes of a node: the modules around it, a list as text.
SCOPES = "pkg.torch.onnx.name_scopes"
_OTHER_PATHS = ("namespace", "pkg.torch.onnx.scopes")  # where a node has no scopes
_NO_SCOPE = "_empty_nn_module_stack_from_metadata_hook"  # what torch writes where a pass of its own made a node in no module
_MOST_SCOPES = 10_000  # letters of a text of scopes that is read


# ---------------------------------------------------------------------------------------------------------------- nodes
def attr(node: ir.Node, name: str, default: Any = _SCHEMA) -> Any:
    """The value of a node's attribute; where it has none, ``default``, by default what the operator's ONNX schema says, or None."""
    found = node.attributes.data.get(name)  # asked of every node: UserDict's own dictionary is faster
    if found is not None:
        return found.value
    return schema_default(node.domain, node.op_type, name) if default is _SCHEMA else default


@functools.cache
def schema_default(domain: str, op_type: str, name: str) -> Any:
    """What an attribute is where a node does not say it; None where there is no such schema, attribute or default. From opset 18 on no default changes its meaning."""
    domain = "" if domain in _STANDARD else domain
    for newest in (onnx.defs.onnx_opset_version(), _OLDEST):  # an attribute that became an input since is in the older schema
        try:
            schema = onnx.defs.get_schema(op_type, newest, domain) if not domain else onnx.defs.get_schema(op_type, domain=domain)
        except onnx.defs.SchemaError:
            return None
        if name in schema.attributes:
            proto = schema.attributes[name].default_value
            return ir.serde.deserialize_attribute(proto).value if proto.type else None
    return None


def is_python_op(node: ir.Node) -> bool:
    """Whether a node is the forward of a call of a torch.autograd.Function."""
    return node.op_type == PYTHON_OP and node.domain == ORT_DOMAIN


def is_python_op_tangent(node: ir.Node) -> bool:
    """Whether a node is such a call with tangents."""
    return node.op_type == PYTHON_OP_TANGENT and node.domain == OWN_DOMAIN


def function_of(node: ir.Node) -> str:
    """The name of the Function or operator that such a node calls; "" where it says none, or what is no text."""
    name = attr(node, "name", None)
    return name if isinstance(name, str) else ""


def is_mark(node: ir.Node) -> bool:
    """Whether a node says that no gradient flows through it."""
    return node.op_type == MARK_OP and node.domain == MARK_DOMAIN


def trains(node: ir.Node) -> bool:
    """Whether a node behaves as in training: a Dropout that drops, a BatchNormalization of the batch's own statistics."""
    if node.domain not in _STANDARD:
        return False
    if node.op_type == "BatchNormalization":
        return bool(attr(node, "training_mode"))
    if node.op_type == "Dropout" and len(node.inputs) > 2:
        mode = array_of(node.inputs[2])
        return mode is not None and bool(mode.any())
    return False


def graph_of(node: ir.Node) -> ir.Graph | ir.Function:
    """The graph or function that a node stands in; the node is in one."""
    assert node.graph is not None, node.name
    return node.graph


# --------------------------------------------------------------------------------------------------------------- values
def name_of(value: ir.Value) -> str:
    """The name of a value.

    Raises:
        FormatError: It has none: the graph was put together without `NameFixPass`.
    """
    if value.name is None:
        maker = value.producer()
        what = "an input or initializer" if maker is None else f"output {value.index()} of {describe(maker)}"
        raise FormatError(f"{what} of the model has no name: give it one, or run onnx_ir.passes.common.NameFixPass on the model")
    return value.name


def dtype_of(value: ir.Value) -> ir.DataType:
    """The element type of a value.

    Raises:
        FormatError: It is not known.
    """
    if value.dtype is None:
        because, way = unknown_because(value, "type")
        raise FormatError(f"the element type of {value.name!r} is not known{because}: {way}")
    return value.dtype


def constant_of(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor of an initializer, or of a Constant node.

    onnx_ir's own function names the tensor of a Constant anew, which may be the caller's.

    Raises:
        FormatError: A Constant node without a value.
    """
    node = value.producer()
    attribute = None if node is None or node.op_type != "Constant" or node.domain else node.attributes.get("value")
    if attribute is not None and isinstance(attribute.value, ir.TensorProtocol):
        return attribute.value
    try:
        return ir.convenience.get_const_tensor(value)
    except ValueError as error:  # a Constant that says nothing of the kind
        raise FormatError(f"{describe(node) if node is not None else name_of(value)} holds no constant: {error}") from error


def array_of(value: ir.Value | None) -> np.ndarray | None:
    """What an initializer or the output of a Constant holds, None for any other value."""
    tensor = None if value is None else constant_of(value)
    return None if tensor is None else tensor.numpy()


def fixed_array(value: ir.Value | None) -> np.ndarray | None:
    """The same where no caller can give another value: an initializer may be an input, too."""
    return None if value is None or value.is_graph_input() else array_of(value)


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """An input; None where it is not given, or a damaged file leaves it out."""
    return node.inputs[index] if index < len(node.inputs) else None


def made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes a value, where it is of this standard operator."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and node.domain in _STANDARD else None


def is_float(value: ir.Value | None) -> bool:
    """Whether a gradient of this value can exist."""
    dtype = None if value is None else value.dtype
    return dtype is not None and dtype.is_floating_point()


def may_be_float(value: ir.Value | None) -> bool:
    """The same where it is not known what the value is: what depends on it is then refused by name, never left out in silence."""
    return value is not None and (value.dtype is None or value.dtype.is_floating_point())


def shape_in_function(value: ir.Value) -> ir.Shape | None:
    """The shape of a value as a function may say it: without the names of sizes. Two calls in one graph may have other sizes by one name."""
    return None if value.shape is None else ir.Shape([size if isinstance(size, int) else None for size in value.shape])


def is_float_tensor(value: ir.Value | None) -> bool:
    """Whether a value is certainly a float tensor, no sequence or optional of them."""
    return is_float(value) and value is not None and isinstance(value.type, ir.TensorType)


def rank_of(value: ir.Value | None) -> int | None:
    """The rank, None where it is not known."""
    return None if value is None or value.shape is None else len(value.shape)


def is_static(shape: ir.Shape | None) -> bool:
    """Whether every dim is known, as a number."""
    return shape is not None and all(type(d) is int for d in shape)


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape where every dim is a number, otherwise None."""
    shape = None if value is None else value.shape
    if shape is None:
        return None
    dims = tuple(d for d in shape if type(d) is int)
    return dims if len(dims) == len(shape) else None


# ------------------------------------------------------------------------------------------------------------- messages
def operator_text(node: ir.Node) -> str:
    """``Gemm``, ``com.microsoft::PythonOp``, ``own::f:overload``."""
    name = node.op_type + (f":{node.overload}" if node.overload else "")
    return name if node.domain in _STANDARD else f"{node.domain}::{name}"


def scope_of(node: ir.Node) -> str:
    """``model.head``, as torch.export writes it; "" where it wrote nothing."""
    text = node.metadata_props.get(SCOPES, "")
    try:  # ['', 'model', 'model.head', 'linear_8'], the last is the operation
        scopes = [scope for scope in ast.literal_eval(text[:_MOST_SCOPES]) if scope != _NO_SCOPE]
        return str(scopes[-2])
    except (ValueError, SyntaxError, IndexError, TypeError, MemoryError, RecursionError):
        return ""


def describe(node: ir.Node) -> str:
    """``Operator (node 'name' in module.path)`` for messages."""
    operator = shown(operator_text(node))
    props = node.metadata_props
    path = scope_of(node) if SCOPES in props else next((props[key] for key in _OTHER_PATHS if key in props), "")
    names = [repr(shown(o.name)) for o in node.outputs if o.name]
    outputs = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    where = f" in module {shown(path)}" if path else ""
    return f"{operator} (node {shown(node.name or '')!r} that makes {outputs}{where})"


def unknown_because(value: ir.Value, what: str) -> tuple[str, str]:
    """Why the type or shape of a value is not known, and the way out: it names the operator before it that ONNX's inference does not pass.

    Args:
        value: Of a graph whose types and shapes were inferred.
        what: "type" or "shape".
    """
    todo, seen = [value], set()
    for each in todo:  # the nearest: what is written down of it makes known what is behind it
        node = each.producer()
        if node is None or node in seen or (each.dtype if what == "type" else each.shape) is not None:
            continue
        if not _is_inferred(node.domain, node.op_type):
            name = shown(operator_text(node))
            return (
                f", as ONNX has no inference for {describe(node)}",
                f"give {name} a function body in the file, or write the {what} of {shown(each.name or '')!r} into the graph's value_info",
            )
        seen.add(node)
        todo += [v for v in node.inputs if v is not None]
        bodies = [a.value for a in node.attributes.values() if a.type is ir.AttributeType.GRAPH]
        todo += [output for body in bodies for output in body.outputs]
    return "", f"run shape inference on the model, or add the {what} to it"


@functools.cache
def _is_inferred(domain: str, op_type: str) -> bool:
    """Whether ONNX may infer what an operator gives out."""
    try:
        schema: Any = onnx.defs.get_schema(op_type, domain="" if domain in _STANDARD else domain)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_type_and_shape_inference_function or schema.has_function or schema.has_context_dependent_function)


def check_unrolled(node: ir.Node, count: int) -> None:
    """Refuse what would be written down part by part, where an attribute or a declared shape asks for too many parts.

    Raises:
        UnsupportedOperatorError: More than MAX_UNROLLED parts.
    """
    if count > MAX_UNROLLED:
        raise unsupported(node, f"it would be written in {count} parts, one by one, and at most {MAX_UNROLLED} are")


def unsupported(node: ir.Node, reason: str, way: str = "") -> UnsupportedOperatorError:
    """The error of an operator whose gradient cannot be written; it says why and the way out, which by default is to add a rule."""
    domain = f", domain={node.domain!r}" if node.domain else ""
    return UnsupportedOperatorError(
        f"no gradient for {describe(node)}: {reason}. "
        f"{way or f'Add or replace its rule with @exporter.gradient({node.op_type!r}{domain}) or overrides='}, or leave what depends on it out of wrt or outputs.",
        faq=Faq.NO_GRADIENT,
    )
