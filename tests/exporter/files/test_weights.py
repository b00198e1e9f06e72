"""Files that other tools wrote: which of their tensors are weights, wherever they stand, and what only looks like one."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser

import exporter
from exporter.files.weights import foreign_state
from symbolics.node.metadata import read_pairing

RANDOM = np.random.default_rng(5)


def array(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def constant(name, value):
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value, "?"))


def model_of(nodes, inputs, outputs, initializers=()):
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
    graph = helper.make_graph(
        nodes, "g", infos, results, [numpy_helper.from_array(value, name) for name, value in dict(initializers).items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model, full_check=False)
    return model


def trains(model, *inputs):
    """Three steps of SGD lower the loss, and the caller's model stays as it was; the names of the parameters."""
    before = model.SerializeToString()
    module = exporter.load(model)
    exporter.build_gradient_graph(model)
    assert model.SerializeToString() == before
    found = module(*map(torch.from_numpy, inputs))
    plain = onnxruntime.InferenceSession(model.SerializeToString()).run(
        None, dict(zip((v.name for v in model.graph.input), inputs, strict=True))
    )
    np.testing.assert_allclose(found.detach().numpy(), plain[0], rtol=1e-5, atol=1e-6)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(*map(torch.from_numpy, inputs)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    return {name for name, _ in module.named_parameters()}


def test_weights_in_constant_nodes():
    """As Paddle's exporter writes them."""
    nodes = [
        constant("w", array(3, 4)),
        constant("b", array(4)),
        constant("two", np.float32(2)),
        constant("shape", np.array([-1, 2], np.int64)),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["a"]),
        helper.make_node("Mul", ["a", "two"], ["m"]),
        helper.make_node("Reshape", ["m", "shape"], ["y"]),
    ]
    model = model_of(nodes, {"x": [2, 3]}, {"y": [4, 2]})
    assert trains(model, array(2, 3)) == {"w", "b"}
    pairing = read_pairing(exporter.build_gradient_graph(model).metadata_props)
    assert pairing is not None and set(pairing.outputs) == {"x", "w", "b"}


def test_a_constant_beside_initializers_stays_one():
    nodes = [constant("mean", array(3)), helper.make_node("Sub", ["x", "mean"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])]
    assert trains(model_of(nodes, {"x": [2, 3]}, {"y": [2, 4]}, {"w": array(3, 4)}), array(2, 3)) == {"w"}


@pytest.mark.parametrize("as_initializers", [True, False])
def test_weights_in_branches(as_initializers):
    """Names that stand in both branches; torch's own exporter writes some networks so."""

    def branch(scale):
        nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Mul", ["h", "s"], ["out"])]
        tensors = {"w": array(3, 4), "s": np.full(4, scale, np.float32)}
        if not as_initializers:
            nodes = [constant(name, value) for name, value in tensors.items()] + nodes
        return helper.make_graph(
            nodes, "b", [], [helper.make_tensor_value_info("out", TensorProto.FLOAT, [2, 4])],
            [numpy_helper.from_array(value, name) for name, value in tensors.items()] if as_initializers else [],
        )  # fmt: skip

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Less", ["total", "zero"], ["below"]),
        helper.make_node("If", ["below"], ["y"], then_branch=branch(1), else_branch=branch(-1)),
    ]
    model = model_of(nodes, {"x": [2, 3]}, {"y": [2, 4]}, {"zero": np.float32(0)})
    assert len(trains(model, array(2, 3))) == 4


def test_statistics_and_settings_are_no_weights():
    nodes = [
        helper.make_node("BatchNormalization", ["x", "scale", "shift", "mean", "variance"], ["n"]),
        helper.make_node("Resize", ["n", "", "sizes"], ["y"], mode="linear"),
    ]
    tensors = {
        "scale": array(3),
        "shift": array(3),
        "mean": array(3),
        "variance": array(3) ** 2 + 1,
        "sizes": np.array([1, 1, 2, 2], np.float32),
    }
    model = model_of(nodes, {"x": [2, 3, 4, 4]}, {"y": [2, 3, 8, 8]}, tensors)
    assert trains(model, array(2, 3, 4, 4)) == {"scale", "shift"}
    module = exporter.load(model)
    assert {name for name, _ in module.named_buffers()} == {"mean", "variance"}
    assert set(module.state_dict()) == set(tensors) - {"sizes"}
    pairing = read_pairing(exporter.build_gradient_graph(model).metadata_props)
    assert pairing is not None and set(pairing.outputs) == {"x", "scale", "shift"}
    explicit = read_pairing(exporter.build_gradient_graph(model, wrt=["mean"]).metadata_props)
    assert explicit is not None and set(explicit.outputs) == {"mean"}


def test_constants_that_are_settings_stay_constants():
    """The gradient of a Resize must know its scales."""
    nodes = [
        constant("w", array(3, 3, 1, 1)),
        constant("roi", np.zeros(0, np.float32)),
        constant("scales", np.array([1, 1, 2, 2], np.float32)),
        helper.make_node("Conv", ["x", "w"], ["h"]),
        helper.make_node("Resize", ["h", "roi", "scales"], ["r"], mode="nearest"),
        helper.make_node("Add", ["r", "b"], ["y"]),
        constant("b", array(1, 3, 1, 1)),
    ]
    nodes.insert(0, nodes.pop())
    assert trains(model_of(nodes, {"x": ["N", 3, "H", "W"]}, {"y": ["N", 3, "A", "B"]}), array(1, 3, 4, 4)) == {"w", "b"}


def test_what_nobody_reads_is_a_weight():
    proto = model_of([helper.make_node("Identity", ["w"], ["y"])], {"x": [2]}, {"y": [2]}, {"w": array(2), "unread": array(2)})
    assert foreign_state(ir.from_proto(proto)) == {"w": True, "unread": True}


def test_an_output_whose_rank_is_declared_wrongly():
    """onnxruntime runs such a file and warns."""
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [2, 5, 3]}, {"y": ["N", 4]}, {"w": array(3, 4)})
    assert trains(model, array(2, 5, 3)) == {"w"}


def test_a_rank_that_only_its_reader_knows():
    """As torch's exporter writes an LSTM of one step: the rank of the If is open, and LSTM takes three axes."""
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> g (float[N, 3] x, float[2, N, 2] state, bool flat) => (float[N, 2] y, float[2, N, 2] next)
        <int64[1] first = {0}, int64 zero = {0}, int64 one = {1}>
        {
            seq = If (flat) <
                then_branch = a () => (p) { p = Unsqueeze(x, first) },
                else_branch = b () => (q) { q = Identity(x) }
            >
            h = Gather(state, zero)
            c = Gather(state, one)
            hs = If (flat) <
                then_branch = d () => (i) { i = Unsqueeze(h, first) },
                else_branch = e () => (j) { j = Identity(h) }
            >
            cs = If (flat) <
                then_branch = k () => (l) { l = Unsqueeze(c, first) },
                else_branch = m () => (n) { n = Identity(c) }
            >
            all, hn, cn = LSTM <hidden_size = 2> (seq, w, r, , , hs, cs)
            y = Squeeze(hn, first)
            next = Concat <axis = -3> (hn, cn)
        }"""
    )
    model.graph.initializer.extend(numpy_helper.from_array(array(1, 8, size), name) for name, size in (("w", 3), ("r", 2)))
    module = exporter.load(model)
    x, state = torch.randn(4, 3, requires_grad=True), torch.randn(2, 4, 2, requires_grad=True)
    lstm = torch.nn.LSTMCell(3, 2, bias=False)
    w, r = (dict(module.named_parameters())[name][0].detach() for name in "wr")
    order = torch.tensor([0, 1, 4, 5, 6, 7, 2, 3])  # ONNX: input, output, forget, cell; torch: input, forget, cell, output
    with torch.no_grad():
        lstm.weight_ih.copy_(w[torch.cat([order[:2], order[2:6], order[6:]])])
        lstm.weight_hh.copy_(r[torch.cat([order[:2], order[2:6], order[6:]])])
    y, after = module(x, state, torch.tensor(True))
    hidden, cell = lstm(x, (state[0], state[1]))
    torch.testing.assert_close(y, hidden)
    torch.testing.assert_close(after, torch.stack([hidden, cell]))
    ours = torch.autograd.grad((y * 2).sum() + after.square().sum(), (x, state))
    theirs = torch.autograd.grad((hidden * 2).sum() + torch.stack([hidden, cell]).square().sum(), (x, state))
    torch.testing.assert_close(ours, theirs)
