"""Canaries of random draws: each says whether upstream is still wrong."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxscript.optimizer
import torch
from torch.nn import functional

from tests.symbolics.quirks.tools import differs, gradient, translated


def attention_dropout():
    graph = translated(lambda q: functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5), torch.randn(1, 2, 3, 4)).graph
    return any(node.op_type == "Dropout" and len(node.inputs) < 3 for node in graph)


def equal_draws():
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[3])
    one, two = ir.node("Bernoulli", [x]), ir.node("Bernoulli", [x])
    both = ir.node("Sub", [one.outputs[0], two.outputs[0]])
    graph = ir.Graph([x], both.outputs, nodes=[one, two, both], opset_imports={"": 18}, name="g")
    passes.CommonSubexpressionEliminationPass()(ir.Model(graph, ir_version=10))
    return len(graph) == 2


def normal_draws():
    return differs(gradient(lambda x: torch.normal(x, torch.ones(3)), torch.zeros(3)))


def dropouts():
    """Each is a Dropout where torch writes it as one."""
    calls = (
        lambda x: functional.dropout2d(x, 0.5, True),
        lambda x: functional.alpha_dropout(x, 0.5, True),
        lambda x: functional.feature_alpha_dropout(x, 0.5, True),
        lambda x: functional.dropout(x + 1, 0.5, True, inplace=True),
    )
    return any("Dropout" not in {node.op_type for node in translated(call, torch.ones(2, 3, 4, 4)).graph} for call in calls)


def folded_draws():
    ones = ir.tensor(np.ones(8, np.float32))
    made = [ir.node("Constant", [], {"value": tensor}) for tensor in (ones, ir.tensor(np.float32(0.5)), ir.tensor(np.array(True)))]
    drop = ir.node("Dropout", [node.outputs[0] for node in made])
    drop.outputs[0].type, drop.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([8])
    graph = ir.Graph([], drop.outputs, nodes=[*made, drop], opset_imports={"": 18}, name="g")
    onnxscript.optimizer.fold_constants(ir.Model(graph, ir_version=10))
    return "Dropout" not in {node.op_type for node in graph}
