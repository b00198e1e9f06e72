"""Train-mode BatchNormalization on onnxruntime, which writes over what it reads."""

from __future__ import annotations

import onnx_ir as ir

from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "copied", "pin_running_statistics", "read_copies"]

QUIRK = Quirk(
    upstream="onnxruntime",
    seen="1.31.1",
    wrong="the kernel writes the new running statistics into the buffers of the old ones before it reads weight and bias: where a buffer is "
    "theirs too (the optimizer merges equal initializers, as a fresh model's weight and running variance), Y is wrong without a word",
    issue="microsoft/onnxruntime#29790",
)


def pin_running_statistics(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Let each train-mode BatchNormalization whose statistics are buffers of the model, or values that others read too, read copies of them."""
    found = False
    for node in nodes:
        if node.op_type == "BatchNormalization" and node.domain in ("", "ai.onnx") and node.attributes.get_int("training_mode"):
            mean, var = node.inputs[3:5]
            if mean is not None and var is not None and (_is_wanted(mean) or _is_wanted(var)):
                read_copies(node, mean, var)
                found = True
    return found


def _is_wanted(value: ir.Value) -> bool:
    """Whether anybody else may read a statistic."""
    return copied(value) is None and (value.producer() is None or value.is_graph_output() or len(value.uses()) > 1)


def read_copies(node: ir.Node, mean: ir.Value, var: ir.Value) -> None:
    """Let a BatchNormalization read copies of these statistics; nothing happens where it does already.

    A computed value has a buffer of its own: so each statistic goes through a Where of which both branches are the statistic
    itself, on a condition that no optimizer can know and that is another one for each input of the node.
    """
    x, graph = node.inputs[0], node.graph
    assert x is not None and graph is not None
    if copied(node.inputs[3]) is mean and copied(node.inputs[4]) is var:
        return
    tape = ir.tape.Tape()
    rank = len(x.shape) if x.shape is not None else 1
    first = x if x.shape is not None else tape.op("Reshape", [x, tape.op("Constant", [], {"value_ints": [-1]})])
    zero, one = (tape.op("Constant", [], {"value_ints": [n] * rank}) for n in (0, 1))
    probe = tape.op("IsNaN", [tape.op("Slice", [first, zero, one])])
    condition = tape.op("Reshape", [probe, tape.op("Constant", [], {"value_ints": [1]})])
    for index, value in ((3, mean), (4, var)):
        copy = tape.op("Where", [condition, value, value])
        copy.shape, copy.type = value.shape, value.type
        node.replace_input_with(index, copy)
    graph.insert_before(node, tape.nodes)


def copied(value: ir.Value | None) -> ir.Value | None:
    """The statistic of which `read_copies` made this copy; None for any other value."""
    maker = None if value is None else value.producer()
    is_copy = maker is not None and maker.op_type == "Where" and len(maker.inputs) == 3 and maker.inputs[1] is maker.inputs[2]
    return maker.inputs[1] if maker is not None and is_copy else None
