"""Sums and means over nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from symbolics.graph.values import array_of
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "SYMBOLICS", "axes_from_the_front", "means_of_nothing"]

QUIRK = Quirk(
    upstream="torch and onnxruntime",
    seen="2.13, 1.31.1",
    wrong="onnxruntime does not reduce along an axis that is counted from the end where there are no elements, and its mean of nothing is 0, where torch's is "
    "NaN; TorchScript keeps the dimensions of a total over nothing",
)


def _total(original: Any, g: Any, x: Any, *rest: Any) -> Any:
    """aten::sum, aten::mean and aten::prod over everything, without dimensions."""
    result = original(g, x, *rest)
    if len(rest) < 2 and 0 in (x.type().sizes() or ()) and result.node().kind().startswith("onnx::Reduce"):
        result.node().i_("keepdims", 0)
        result.setType(x.type().with_sizes([]))
    return result


#: For torch.onnx.export(dynamo=False).
SYMBOLICS: dict[str, Callable[..., Any]] = {"aten::sum": _total, "aten::mean": _total, "aten::prod": _total}


def means_of_nothing(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Write a mean over nothing as the sum over it, divided by 0."""
    changed = False
    for node in nodes:
        x = node.inputs[0] if node.inputs else None
        if (node.domain, node.op_type) != ("", "ReduceMean") or node.graph is None or x is None or 0 not in (x.shape or ()):
            continue
        y = node.outputs[0]
        dtype = y.dtype or x.dtype or ir.DataType.FLOAT
        none = ir.node("Constant", [], {"value": ir.tensor(np.zeros((), dtype.numpy()), dtype=dtype)})
        total = ir.node("ReduceSum", node.inputs, dict(node.attributes))
        for new, name in ((none, "count"), (total, "sum")):
            new.name = new.outputs[0].name = f"{y.name}/{name}"
            new.outputs[0].type = ir.TensorType(dtype)
        none.outputs[0].shape, total.outputs[0].shape = ir.Shape([]), y.shape
        node.graph.insert_before(node, [none, total])
        node.op_type = "Div"
        node.attributes.clear()
        node.resize_inputs(2)
        for index, value in enumerate((total.outputs[0], none.outputs[0])):
            node.replace_input_with(index, value)
        changed = True
    return changed


def axes_from_the_front(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Count the axes of reductions from the front, where a dimension is 0 or may be."""
    changed = False
    for node in nodes:
        if node.domain or not node.op_type.startswith("Reduce") or node.graph is None or len(node.inputs) != 2:
            continue
        x, axes = node.inputs
        if x is None or axes is None or x.shape is None or all(isinstance(dim, int) and dim for dim in x.shape):
            continue
        found = array_of(axes)
        if found is None or not (found < 0).any():
            continue
        front = ir.node("Constant", [], {"value": ir.tensor(np.where(found < 0, found + len(x.shape), found).astype(np.int64))})
        front.name = front.outputs[0].name = f"{node.outputs[0].name}/axes"
        front.outputs[0].type, front.outputs[0].shape = ir.TensorType(ir.DataType.INT64), ir.Shape(found.shape)
        node.graph.insert_before(node, front)
        node.replace_input_with(1, front.outputs[0])
        changed = True
    return changed
