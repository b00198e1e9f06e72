"""Dropout inside If, Loop and Scan: drawn from torch's generator, another mask each pass, the forward's mask in the gradient."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import exporter
from tests.trains import loaded

SHAPE = (20, 30)
STEPS = 6
FLOAT, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64


def _value(name, shape=SHAPE, kind=FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def _constants(**values):
    kinds = {float: np.float32, bool: np.bool_, int: np.int64}
    return [onnx.numpy_helper.from_array(np.array(value, kinds[type(value)]), name) for name, value in values.items()]


def _model(nodes, inputs, outputs, **constants):
    graph = helper.make_graph(nodes, "g", inputs, outputs, _constants(ratio=0.5, train=True, **constants))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


DROP = helper.make_node("Dropout", ["i", "ratio", "train"], ["d"], name="the_drop")


def _scan():
    """x (STEPS, *SHAPE) -> the sum over the steps and each step's value."""
    nodes = [DROP, helper.make_node("Add", ["s", "d"], ["t"]), helper.make_node("Identity", ["d"], ["y"])]
    body = helper.make_graph(nodes, "body", [_value("s"), _value("i")], [_value("t"), _value("y")])
    zeros = helper.make_node("Sub", ["first", "first"], ["zero"])
    first = helper.make_node("Gather", ["x", "at"], ["first"])
    scan = helper.make_node("Scan", ["zero", "x"], ["total", "each"], name="the_scan", body=body, num_scan_inputs=1)
    return _model([first, zeros, scan], [_value("x", (STEPS, *SHAPE))], [_value("total"), _value("each", (STEPS, *SHAPE))], at=0)


def _loop():
    """The same as a Loop."""
    nodes = [
        helper.make_node("Gather", ["x", "n"], ["i"]),
        DROP,
        helper.make_node("Add", ["s", "d"], ["t"]),
        helper.make_node("Identity", ["c"], ["again"]),
    ]
    nodes.append(helper.make_node("Identity", ["d"], ["y"]))
    inputs = [_value("n", (), INT64), _value("c", (), BOOL), _value("s")]
    body = helper.make_graph(nodes, "body", inputs, [_value("again", (), BOOL), _value("t"), _value("y")])
    zeros = helper.make_node("Sub", ["first", "first"], ["zero"])
    first = helper.make_node("Gather", ["x", "at"], ["first"])
    loop = helper.make_node("Loop", ["steps", "train", "zero"], ["total", "each"], name="the_loop", body=body)
    return _model(
        [first, zeros, loop], [_value("x", (STEPS, *SHAPE))], [_value("total"), _value("each", (STEPS, *SHAPE))], at=0, steps=STEPS
    )


def _correlation(a, b):
    return abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item())


@pytest.mark.parametrize("make", [_scan, _loop], ids=["Scan", "Loop"])
def test_each_pass_has_its_mask_and_the_gradient_has_the_same(make):
    module = exporter.load(make())
    x = torch.ones(STEPS, *SHAPE, requires_grad=True)
    torch.manual_seed(5)
    total, each = module(x)
    torch.testing.assert_close(total, each.sum(0))
    total.sum().backward()
    torch.testing.assert_close(x.grad, each.detach())  # of ones: 2 where kept
    kept = (each.detach() > 0).float()
    assert set(each.detach().unique().tolist()) == {0.0, 2.0}
    assert abs(kept.mean().item() - 0.5) < 0.035  # 4 sigma of 3600 draws
    for one in range(STEPS):
        for two in range(one):
            assert _correlation(kept[one], kept[two]) < 0.17  # 4 sigma of 600
    torch.manual_seed(5)
    assert torch.equal(module(x)[1], each)
    assert not torch.equal(module(x)[1], each)
    assert torch.equal(module.eval()(x)[1], torch.ones(STEPS, *SHAPE))


def _loop_in_a_scan():
    inner = [DROP, helper.make_node("Identity", ["c"], ["again"]), helper.make_node("Identity", ["d"], ["y"])]
    body = helper.make_graph(inner, "inner", [_value("n", (), INT64), _value("c", (), BOOL)], [_value("again", (), BOOL), _value("y")])
    loop = helper.make_node("Loop", ["steps", "train"], ["ys"], body=body)
    outer = helper.make_graph([loop], "outer", [_value("i")], [_value("ys", (2, *SHAPE))])
    scan = helper.make_node("Scan", ["x"], ["all"], body=outer, num_scan_inputs=1)
    return exporter.load(_model([scan], [_value("x", (3, *SHAPE))], [_value("all", (3, 2, *SHAPE))], steps=2))


def test_a_loop_inside_a_scan_counts_both():
    """Every pass of the inner loop inside every pass of the outer scan is a draw of its own."""
    module = _loop_in_a_scan()
    with torch.no_grad():
        masks = (module(torch.ones(3, *SHAPE)) > 0).float().flatten(0, 1)
    assert max(_correlation(masks[a], masks[b]) for a in range(6) for b in range(a)) < 0.17


def test_the_gradient_of_a_loop_inside_a_scan():
    x = torch.ones(3, *SHAPE, requires_grad=True)
    found = _loop_in_a_scan()(x)
    found.sum().backward()
    torch.testing.assert_close(x.grad, found.detach().sum(1))


class _Branches(torch.nn.Module):
    def forward(self, x):
        drop = torch.nn.functional.dropout
        return torch.cond(x.sum() > 0, lambda x: drop(x, 0.5, True), lambda x: drop(x, 0.25, True) * 3, (x,))


@pytest.mark.parametrize(("sign", "ratio", "factor"), [(1, 0.5, 1), (-1, 0.25, 3)])
def test_in_the_branches_of_torchs_cond(sign, ratio, factor):
    x = sign * torch.ones(100, 100)
    module = loaded(_Branches().train(), (x,))
    x.requires_grad_()
    torch.manual_seed(2)
    y = module(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad * x.detach(), y.detach())
    assert y.detach().abs().max().item() == pytest.approx(factor / (1 - ratio))
    assert abs((y == 0).float().mean().item() - ratio) < 0.02
    torch.manual_seed(2)
    assert torch.equal(module(x), y)
    assert not torch.equal(module(x), y)


def test_a_body_whose_passes_have_no_number_is_refused():
    body = helper.make_graph([DROP], "body", [_value("i")], [_value("d")])
    nodes = [
        helper.make_node("SequenceConstruct", ["x", "x"], ["xs"]),
        helper.make_node("SequenceMap", ["xs"], ["ys"], name="the_map", body=body),
        helper.make_node("SequenceAt", ["ys", "at"], ["y"]),
    ]
    with pytest.raises(exporter.UnsupportedOperatorError, match="the_map.*Dropout in its body"):
        exporter.load(_model(nodes, [_value("x")], [_value("y")], at=0))(torch.ones(SHAPE))


def test_a_ratio_that_is_computed_is_refused():
    drop = helper.make_node("Dropout", ["x", "r", "train"], ["y"], name="the_drop")
    model = _model([drop], [_value("x"), _value("r", ())], [_value("y")])
    with pytest.raises(exporter.UnsupportedOperatorError, match="ratio of Dropout 'the_drop'"):
        exporter.load(model)(torch.ones(SHAPE), torch.tensor(0.5))
