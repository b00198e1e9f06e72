"""What constants decide: a choice between two values whose condition is known, as the switches of observers are in a model that is done with training."""

from __future__ import annotations

import onnx_ir as ir

from exporter.quantization.evaluation import Constants
from exporter.quantization.straight_through import hand_on
from symbolics.node.metadata import BufferChanges, changes_of, write_changes
from symbolics.node.names import BUFFERS_KEY

__all__ = ["decide", "drop_settled_buffers"]


def decide(model: ir.Model) -> None:
    """Put what is chosen in the place of each Where whose condition is one constant, in place."""
    while True:
        constants = Constants(model)
        decided = False
        for node in list(model.graph):
            condition = node.inputs[0] if node.op_type == "Where" and not node.domain else None
            if condition is None or condition not in constants or node.outputs[0] in constants:
                continue
            array = constants.array(condition)
            chosen = node.inputs[1 if array.size and array.flat[0] else 2]
            if not array.size or (array != array.flat[0]).any() or chosen is None or not _same_shape(chosen, node.outputs[0]):
                continue
            hand_on(node, chosen)
            decided = True
        if not decided:
            return


def _same_shape(one: ir.Value, other: ir.Value) -> bool:
    """Whether two values are known to have one shape."""
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return False
    dims = zip(one.shape, other.shape, strict=True)
    return all(a == b and (isinstance(a, int) or (isinstance(a, ir.SymbolicDim) and a.value is not None)) for a, b in dims)


def drop_settled_buffers(model: ir.Model) -> None:
    """Take out the next values of buffers that are the same in each run: nothing observes any more."""
    changes = changes_of(model)
    constants = Constants(model)
    settled = {value.name for value in model.graph.outputs if value.name in set(changes.carried.values()) and value in constants}
    if not settled:
        return
    model.graph.outputs[:] = [value for value in model.graph.outputs if value.name not in settled]
    carried = {buffer: output for buffer, output in changes.carried.items() if output not in settled}
    model.metadata_props[BUFFERS_KEY] = write_changes(BufferChanges(carried, changes.lost, changes.always))
