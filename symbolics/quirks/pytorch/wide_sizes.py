"""Numbers that follow from sizes, which are float64 in Python."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from symbolics.graph.values import array_of, attr, graph_of, input_of
from symbolics.graph.walk import walk
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "give_digits", "wide_sizes"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="both exporters compute floats that follow from sizes (x.shape[0] ** 0.5) in float32, and cast the result: 1e-8 off in float64, and int(n * 0.29) is another number",
)

#: Where whole numbers that follow from sizes alone come from, and what is computed with them. A Cast between whole numbers is not among them: it makes a tensor.
_SIZES = ("Shape", "Size")
_WHOLE = (
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Mod",
    "Pow",
    "Neg",
    "Abs",
    "Max",
    "Min",
    "Gather",
    "Slice",
    "Squeeze",
    "Unsqueeze",
    "Floor",
    "Where",
    "Equal",
)
#: What is computed with floats; onnxruntime's CPU has all of it in float64.
_FLOAT = (
    "Abs", "Add", "Ceil", "Cos", "Div", "Exp", "Floor", "Log", "Max", "Min", "Mul", "Neg", "Pow", "Reciprocal", "Round", "Sin", "Sqrt", "Sub", "Squeeze", "Unsqueeze",
)  # fmt: skip
#: What such a number may become in float64: a tensor, or int() of it.
_EXACT = (ir.DataType.DOUBLE, ir.DataType.INT64)

_LARGEST = float(np.finfo(np.float32).max)


def wide_sizes(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Compute in float64 what becomes float64 or a whole number, from the sizes on, with the digits that its constants have in Python.

    A float32 tensor that the model makes of such a number (``torch.tensor(n ** 0.5)``) is a Cast of float32 to float32 here, and stays as it is.
    """
    wide = _Wide()
    for node in nodes:
        if node.domain == "" and (place := _meets(node)) is not None and (twin := wide.of(input_of(node, place))) is not None:
            node.replace_input_with(place, twin)
    return bool(wide.twins)


def _meets(node: ir.Node) -> int | None:
    """The input of a node that has to be in float64 there, if it is such a number."""
    first, second = input_of(node, 0), input_of(node, 1)
    if node.op_type == "Cast":
        return 0 if attr(node, "to", 0) in _EXACT else None
    if node.op_type == "CastLike":
        return 0 if second is not None and second.dtype in _EXACT else None
    return 1 if node.op_type == "Pow" and first is not None and first.dtype == ir.DataType.DOUBLE else None


def give_digits(model: ir.Model, program: torch.fx.GraphModule) -> None:
    """Write what is cast to float64 with all the digits that it has in the program of torch.export: torchlib writes it in float32.

    Args:
        model: What the program was translated to; changed.
        program: Its calls have the numbers.
    """
    found = [leaf for part in program.modules() if isinstance(part, torch.fx.GraphModule) for node in part.graph.nodes for leaf in pytree.tree_leaves((node.args, node.kwargs))]  # fmt: skip
    numbers = {
        float(np.float32(leaf)): leaf
        for leaf in found
        if isinstance(leaf, float) and abs(leaf) < _LARGEST and float(np.float32(leaf)) != leaf
    }
    for node in walk(model.graph) if numbers else ():
        value = input_of(node, 0)
        if value is None or node.domain or node.op_type not in ("Cast", "CastLike") or _meets(node) is None:
            continue
        if (maker := value.producer()) is None:
            continue
        short = maker.attributes.get("value_float")
        array = array_of(value) if short is None else np.array(short.as_float(), np.float32)
        if array is not None and array.dtype == np.float32 and array.size == 1 and (number := numbers.get(float(array.item()))) is not None:
            made = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(np.full(array.shape, number)))], name=f"{value.name}/wide")
            made.outputs[0].name, made.outputs[0].type, made.outputs[0].shape = (
                made.name,
                ir.TensorType(ir.DataType.DOUBLE),
                ir.Shape(array.shape),
            )
            graph_of(node).insert_before(node, made)
            node.replace_input_with(0, made.outputs[0])


class _Wide:
    """Finds such numbers, and makes their twins in float64.

    Attributes:
        twins: The twin of each number that has one.
        known: What is known of the values that were asked about: None of one that is no such number, otherwise whether a size is in it.
    """

    def __init__(self) -> None:
        self.twins: dict[ir.Value, ir.Value] = {}
        self.known: dict[tuple[ir.Value, bool], bool | None] = {}

    def of(self, value: ir.Value | None) -> ir.Value | None:
        """The twin of a number in float32; None where it is none, or follows from no size."""
        return self.twin(value) if value is not None and self.follows(value, whole=False) else None

    def follows(self, value: ir.Value | None, *, whole: bool) -> bool | None:
        """`known` of a value, as a whole number or as one in float32."""
        if value is None:
            return None
        key = (value, whole)
        if key not in self.known:
            self.known[key] = None
            self.known[key] = self._whole(value) if whole else self._float(value)
        return self.known[key]

    def _all(self, values: Iterable[ir.Value | None], *, whole: bool) -> bool | None:
        found = [self.follows(value, whole=whole) for value in values]
        return None if None in found else any(found)

    def _whole(self, value: ir.Value) -> bool | None:
        node = value.producer()
        if node is None or node.domain:
            return None
        if node.op_type == "Constant":
            array = array_of(value)
            return False if array is not None and array.dtype.kind == "i" else None
        if node.op_type in _SIZES:
            return True
        if node.op_type == "Cast":  # int(n * 0.29); one of a whole number makes a tensor
            return self.follows(input_of(node, 0), whole=False) if attr(node, "to", 0) == ir.DataType.INT64 else None
        return self._all(node.inputs, whole=True) if node.op_type in _WHOLE else None

    def _float(self, value: ir.Value) -> bool | None:
        node = value.producer()
        if node is None or node.domain:
            return None
        if node.op_type == "Constant":  # with no other digits in Python
            array = array_of(value)
            return False if array is not None and array.dtype == np.float32 and array.size == 1 and _is_short(array) else None
        if node.op_type == "Cast":
            if attr(node, "to", 0) != ir.DataType.FLOAT:
                return None
            return False if _digits(node) is not None else self.follows(input_of(node, 0), whole=True)
        if node.op_type == "Pow":  # its exponent may be whole
            base, exponent = self.follows(input_of(node, 0), whole=False), self._exponent(node)
            return None if base is None or exponent is None else base or exponent
        if node.op_type in ("Squeeze", "Unsqueeze"):
            return self.follows(input_of(node, 0), whole=False)
        return self._all(node.inputs, whole=False) if node.op_type in _FLOAT else None

    def _exponent(self, node: ir.Node) -> bool | None:
        exponent = input_of(node, 1)
        found = self.follows(exponent, whole=False)
        return self.follows(exponent, whole=True) if found is None else found

    def twin(self, value: ir.Value) -> ir.Value:
        """The same number in float64."""
        if value in self.twins:
            return self.twins[value]
        node = value.producer()
        assert node is not None
        inputs: list[ir.Value | None]
        if node.op_type == "Constant":
            array = array_of(value)
            assert array is not None
            return self._made(value, node, "Constant", [], [ir.AttrTensor("value", ir.tensor(array.astype(np.float64)))])
        if (digits := _digits(node)) is not None:
            return digits
        if node.op_type == "Cast":
            return self._made(value, node, "Cast", [input_of(node, 0)], [ir.AttrInt64("to", ir.DataType.DOUBLE)])
        # What is no number in float32 is a whole exponent, or the axes of a Squeeze.
        inputs = [each if each is None or self.follows(each, whole=False) is None else self.twin(each) for each in node.inputs]
        return self._made(value, node, node.op_type, inputs, node.attributes.values())

    def _made(self, value: ir.Value, node: ir.Node, op_type: str, inputs: list[ir.Value | None], attributes: Iterable[ir.Attr]) -> ir.Value:
        made = ir.Node("", op_type, inputs, attributes, name=f"{value.name}/wide")
        made.metadata_props.update(node.metadata_props)
        result = self.twins[value] = made.outputs[0]
        result.name, result.type, result.shape = made.name, ir.TensorType(ir.DataType.DOUBLE), value.shape
        graph_of(node).insert_after(node, made)
        return result


def _is_short(array: np.ndarray) -> bool:
    """Whether a number in float32 is the one that it is read as: 0.5, and not 0.1."""
    return float(str(array.reshape(-1)[0])) == float(array.reshape(-1)[0])


def _digits(node: ir.Node) -> ir.Value | None:
    """The constant in float64 that a Cast rounds to float32."""
    value = input_of(node, 0) if node.op_type == "Cast" else None
    array = None if value is None or value.producer() is None else array_of(value)
    return value if array is not None and array.dtype == np.float64 and array.size == 1 else None
