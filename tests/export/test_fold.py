"""The optimizer of the TorchScript path: what it leaves out finds nothing there, and what it merges is equal."""

from __future__ import annotations

import io

import onnx
import onnx_ir as ir
import torch
from torch import nn

import exporter
from exporter._fold import fold
from exporter.hook import _constants_to_initializers


def parsed(text):
    return ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}'))


def kinds(model):
    return [node.op_type for node in model.graph]


def test_unused_nodes_and_initializers_go():
    model = parsed("g (float[2] x) => (float[2] y) <float[1] unused = {1}> { a = Neg(x) b = Abs(a) y = Relu(x) }")
    fold(model)
    assert kinds(model) == ["Relu"]
    assert not model.graph.initializers


def test_an_unused_optional_output_goes():
    model = parsed("g (float[2] x) => (float[2] y) { y, mask = Dropout(x) }")
    node = next(iter(model.graph))
    node.attributes["seed"] = ir.AttrInt64("seed", 1)
    fold(model)
    assert "mask" not in [value.name for node in model.graph for value in node.outputs]


def test_outputs_stay_outputs():
    model = parsed("g (float[2] x) => (float[2] y, float[2] z) { y = Identity(x) z = Relu(x) }")
    fold(model)
    assert [value.name for value in model.graph.outputs] == ["y", "z"]
    onnx.checker.check_model(ir.to_proto(model))


def test_constants_that_bodies_share():
    model = parsed(
        "g (bool c, float[2] x) => (float[2] y) { "
        "y = If(c) <then_branch = t () => (float[2] a) { k = Constant <value = float[1] {2}> () a = Mul(x, k) }, "
        "else_branch = e () => (float[2] b) { n = Constant <value = float[1] {2}> () b = Mul(x, n) }> }"
    )
    fold(model)
    assert len(model.graph.initializers) == 1
    onnx.checker.check_model(ir.to_proto(model))


def constants(text):
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}').graph


def test_equal_constants_merge_before_they_are_nodes():
    text = (
        "g (float[2] x) => (float[2] y) { a = Constant <value = float[1] {2}> () b = Constant <value = float[1] {2}> () "
        "c = Constant <value = double[1] {2}> () d = Cast <to = 1> (c) e = Mul(x, a) f = Mul(e, b) y = Mul(f, d) }"
    )
    for merge, count in ((True, 2), (False, 3)):
        graph = constants(text)
        _constants_to_initializers(graph, merge)
        assert len(graph.initializer) == count
        assert [node.op_type for node in graph.node] == ["Cast", "Mul", "Mul", "Mul"]
        assert {name for node in graph.node for name in node.input} <= {t.name for t in graph.initializer} | {"x", "d", "e", "f"}


def test_constants_that_are_outputs_or_read_in_bodies_keep_their_names():
    graph = constants(
        "g (float[1] x) => (float[1] a, float[1] b) { a = Constant <value = float[1] {2}> () b = Constant <value = float[1] {2}> () }"
    )
    _constants_to_initializers(graph, True)
    assert {tensor.name for tensor in graph.initializer} == {"a", "b"}


class SameNumbers(nn.Module):
    def forward(self, x):
        return torch.where(x > 0.5, x * 0.5, torch.full_like(x, 0.5)) + x[:, :1], x.new_ones(2)


def test_a_model_with_equal_constants_is_right():
    x = torch.randn(3, 4)
    model = exporter.export(SameNumbers(), (x,), dynamo=False)
    found = exporter.reference_evaluator(model).run(None, {"x": x.numpy()})
    for one, two in zip(found, SameNumbers()(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(one), two)
    file = io.BytesIO()
    with exporter.hook():
        torch.onnx.export(SameNumbers(), (x,), file, dynamo=False)
    assert onnx.load_from_string(file.getvalue()) == model.model_proto
