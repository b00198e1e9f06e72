"""An If that asks for a size that is known, of a tensor of which other sizes are open: it is decided before ranks are read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import exporter


def value(name, shape=None):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


@pytest.mark.parametrize("asks", ["Gather", "Slice"])
def test_a_squeeze_in_an_if(asks):
    """What TorchScript writes for squeeze(1), where it does not know the size; a product behind it needs the rank."""
    branches = {
        "then_branch": helper.make_graph([helper.make_node("Squeeze", ["y", "one"], ["squeezed"])], "then", [], [value("squeezed")]),
        "else_branch": helper.make_graph([helper.make_node("Identity", ["y"], ["same"])], "else", [], [value("same")]),
    }
    nodes = [
        helper.make_node("Sin", ["x"], ["y"]),
        helper.make_node("Shape", ["y"], ["sizes"]),
        helper.make_node(asks, ["sizes", "one"] + ["two"] * (asks == "Slice"), ["size"]),
        helper.make_node("Equal", ["size", "one"], ["condition"]),
        helper.make_node("If", ["condition"], ["z"], **branches),
        helper.make_node("Softmax", ["z"], ["p"]),
        helper.make_node("MatMul", ["p", "w"], ["out"]),
    ]
    w = np.diag(np.arange(1, 4, dtype=np.float32))
    constants = {"one": np.array([1]), "two": np.array([2]), "w": w}
    graph = helper.make_graph(
        nodes, "g", [value("x", ["n", 1, 3])], [value("out")], [numpy_helper.from_array(a, name) for name, a in constants.items()]
    )
    module = exporter.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))
    ours, theirs = (x.clone().requires_grad_() for x in torch.randn(5, 1, 3).expand(2, 5, 1, 3))
    module(ours).sin().sum().backward()
    (theirs.sin()[:, 0].softmax(-1) @ torch.from_numpy(w)).sin().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
