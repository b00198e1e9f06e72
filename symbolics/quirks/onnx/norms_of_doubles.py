"""LayerNormalization of doubles, whose epsilon an attribute holds in float32."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from symbolics.graph.values import attr, input_of
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "norms_of_doubles"]

QUIRK = Quirk(
    upstream="onnx",
    seen="1.23.2",
    wrong="attributes are float32: the epsilon of a LayerNormalization in float64 is 2.5e-8 of it off, and what it normalizes up to as much",
)

#: The opset from which ReduceMean takes its axes as an input.
_AXES_ARE_INPUTS = 18


def norms_of_doubles(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Write them out, with the epsilon in float64: the shortest number that is the same in float32, which is the one that people write."""
    axes_are_inputs = model.opset_imports.get("", 0) >= _AXES_ARE_INPUTS
    changed = False
    for node in nodes:
        if (node.domain, node.op_type) != ("", "LayerNormalization") or node.graph is None or (x := input_of(node, 0)) is None:
            continue
        axis = attr(node, "axis", -1)
        if x.dtype is not ir.DataType.DOUBLE or any(output.uses() for output in node.outputs[1:]) or (axis >= 0 and x.shape is None):
            continue
        axes = list(range(axis - (len(x.shape or ()) if axis >= 0 else 0), 0))
        _write_out(node, x, axes, float(str(np.float32(attr(node, "epsilon", 1e-5)))), axes_are_inputs)
        changed = True
    return changed


def _write_out(node: ir.Node, x: ir.Value, axes: list[int], epsilon: float, axes_are_inputs: bool) -> None:
    tape = ir.tape.Tape()
    number = tape.op("Constant", [], {"value": ir.tensor(np.array(epsilon))})
    places = tape.op("Constant", [], {"value": ir.tensor(np.array(axes, np.int64))}) if axes_are_inputs else None

    def mean(value: ir.Value) -> ir.Value:
        return tape.op("ReduceMean", [value] if places is None else [value, places], {} if axes_are_inputs else {"axes": axes})

    centred = tape.op("Sub", [x, mean(x)])
    deviation = tape.op("Sqrt", [tape.op("Add", [mean(tape.op("Mul", [centred, centred])), number])])
    result = tape.op("Div", [centred, deviation])
    scale, bias = input_of(node, 1), input_of(node, 2)
    if scale is not None:
        result = tape.op("Mul", [result, scale])
    if bias is not None:
        result = tape.op("Add", [result, bias])
    for index, new in enumerate(tape.nodes):
        new.name = new.outputs[0].name = f"{node.outputs[0].name}/norm{index}"
        if new.outputs[0] is not places:
            new.outputs[0].type = ir.TensorType(ir.DataType.DOUBLE)
    assert node.graph is not None
    node.graph.insert_before(node, tape.nodes)
    result.shape = node.outputs[0].shape
    node.op_type = "Identity"
    node.resize_inputs(1)
    node.replace_input_with(0, result)
    node.attributes.clear()
    node.resize_outputs(1)
