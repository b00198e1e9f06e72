"""The Dropout of scaled_dot_product_attention(dropout_p=...)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "say_that_attention_drops"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="the dropout of scaled_dot_product_attention is written without training_mode, as a node that passes everything on",
)


def say_that_attention_drops(model: ir.Model, nodes: list[ir.Node]) -> bool:
    """Say of each Dropout that it drops: neither exporter writes one of a model in eval mode."""
    found = [node for node in nodes if node.op_type == "Dropout" and node.domain in ("", "ai.onnx") and len(node.inputs) == 2]
    for node in found:
        drops = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(np.array(True)))])
        drops.outputs[0].type, drops.outputs[0].shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([])
        assert node.graph is not None
        node.graph.insert_before(node, drops)
        node.resize_inputs(3)
        node.replace_input_with(2, drops.outputs[0])
    return bool(found)
