"""The body of a portable Function in the opset of its file, where that is older than the one that torch translates to."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from symbolics.graph.values import array_of, attr, input_of, static_shape
from symbolics.graph.walk import walk

__all__ = ["lower"]

_OLDEST = 13  # before it a Softmax is of a matrix, and axes are attributes nearly everywhere
_AXES = 1  # the input of a reduction that was an attribute
_REDUCTIONS = {
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSumSquare",
}
#: What `reduction` may say, and since when: the attribute is older.
_WORDS = {"max": 18, "min": 18}
_OTHERWISE = {"RoiAlign"}  # without their new attribute they compute something else


def lower(model: ir.Model, opset: int) -> None:
    """Write a model in an older opset, in place: nodes that mean the same in both, and axes that were attributes.

    Raises:
        ValueError: A node has no form in the older one; the message names it.
    """
    if opset < _OLDEST:
        raise ValueError(
            f"functions of a file are written in opset {_OLDEST} or newer, and the file is of {opset}: export with opset_version=18 or newer"
        )
    newer = model.opset_imports[""]
    for node in list(walk(model.graph)):
        if node.domain == "":
            _lower(node, newer, opset)
    model.opset_imports[""] = opset


def _lower(node: ir.Node, newer: int, opset: int) -> None:
    kind = node.op_type
    new = onnx.defs.get_schema(kind, newer, "")
    if new.since_version <= opset:
        return
    old = _schema(kind, opset)
    if old is None or kind in _OTHERWISE:
        raise ValueError(_unsaid(node, opset))
    if kind in _REDUCTIONS:
        _axes_to_attribute(node, opset)
    for name in [name for name in node.attributes if name not in old.attributes]:
        default = new.attributes[name].default_value
        if not (default.type and attr(node, name) == ir.serde.deserialize_attribute(default).value) and not _says_nothing(node, name):
            raise ValueError(_unsaid(node, opset, f" with {name}={attr(node, name)}"))
        node.attributes.pop(name)
    if _WORDS.get(attr(node, "reduction", None), 0) > opset:
        raise ValueError(_unsaid(node, opset, f" with the reduction {attr(node, 'reduction')!r}"))
    given = [index for index, value in enumerate(node.inputs) if value is not None]
    if given and given[-1] >= old.max_input:
        raise ValueError(_unsaid(node, opset, f" with {new.inputs[given[-1]].name}"))
    for index in given:
        value = node.inputs[index]
        if value is not None and not _takes(old, index, value):
            raise ValueError(_unsaid(node, opset, f" of {value.dtype}"))


def _schema(kind: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(kind, opset, "")
    except onnx.defs.SchemaError:
        return None


def _axes_to_attribute(node: ir.Node, opset: int) -> None:
    if (axes := input_of(node, _AXES)) is None:
        return
    if (numbers := array_of(axes)) is None:
        raise ValueError(_unsaid(node, opset, " along axes that are computed"))
    node.resize_inputs(_AXES)
    if numbers.size:  # none: all of them, which is what no attribute means
        node.attributes["axes"] = ir.AttrInt64s("axes", [int(n) for n in numbers.reshape(-1)])
    elif attr(node, "noop_with_empty_axes"):
        node.op_type = "Identity"
        node.attributes.clear()


def _says_nothing(node: ir.Node, name: str) -> bool:
    """Whether a new attribute says what the older operator does: a Reshape without zeros among its sizes, a Split into equal parts."""
    if name == "allowzero":
        sizes = array_of(input_of(node, 1))
        return sizes is not None and bool((sizes != 0).all())
    if name == "num_outputs":
        parts, shape = len(node.outputs), static_shape(node.inputs[0])
        return parts == 1 or (shape is not None and shape[attr(node, "axis")] % parts == 0)
    return False


def _takes(schema: onnx.defs.OpSchema, index: int, value: ir.Value) -> bool:
    """Whether an operator takes an input of this type, where it is known."""
    if value.dtype is None:
        return True
    formal = schema.inputs[min(index, len(schema.inputs) - 1)]
    kind = onnx.helper.tensor_dtype_to_string(int(value.dtype)).rpartition(".")[2].lower()
    return f"tensor({kind})" in formal.types


def _unsaid(node: ir.Node, opset: int, how: str = "") -> str:
    return f"opset {opset} has no {node.op_type}{how}: export with opset_version=18 or newer"
