"""Dropout from a seed: the masks are the documented function of seed, node, passes and position, on every runtime.

tests/exporter/runtime/test_versions.py runs these tests on other releases of onnxruntime as well.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import nn

import exporter
from exporter.train_mode.dropout import dropout_mask, seed_dropout

SEEDS = [0, 1, -1, 20240229, 2**40 + 3, -(2**63), 2**63 - 1]
SHAPE = (7, 33)
RATIO = float(np.float32(0.3))
PASSES = 3
FLOAT, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64


def _constants(**values):
    return [helper.make_tensor(name, kind, [], [value]) for name, (kind, value) in values.items()]


def _seeded(nodes, outputs, **constants):
    """A model of x with masks from a seed, for a runtime."""
    constants = {"p": (FLOAT, RATIO), "t": (BOOL, True), **constants}
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", FLOAT, SHAPE)], outputs, _constants(**constants))
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    assert seed_dropout(model) == "seed"
    return ir.to_proto(model)


def _two():
    nodes = [helper.make_node("Dropout", ["x", "p", "t"], ["y", "first"]), helper.make_node("Dropout", ["y", "p", "t"], ["z", "second"])]
    return _seeded(nodes, [helper.make_tensor_value_info(name, BOOL, SHAPE) for name in ("first", "second")])


def _loop():
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("Dropout", ["x", "p", "t"], ["d", "m"]), helper.make_node("Identity", ["c"], ["again"])]
    body = helper.make_graph(
        nodes, "body", [value("n", INT64, []), value("c", BOOL, [])], [value("again", BOOL, []), value("m", BOOL, SHAPE)]
    )
    loop = helper.make_node("Loop", ["passes", "t"], ["masks"], body=body)
    return _seeded([loop], [value("masks", BOOL, (PASSES, *SHAPE))], passes=(INT64, PASSES))


def _on_onnxruntime(model):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, feeds)


def _on_reference(model):
    evaluator = ReferenceEvaluator(model)
    return lambda feeds: evaluator.run(None, feeds)


@pytest.fixture(params=[_on_onnxruntime, _on_reference], ids=["onnxruntime", "reference"])
def runtime(request):
    return request.param


def _wanted(seed, number=0, passes=()):
    """docs/format.md, on Python's integers."""
    golden, wrap = 0x9E3779B9, 2**32

    def mixed(h):
        for _ in range(2):
            h = (h ^ h >> 16) * 0x045D9F3B % wrap
        return h ^ h >> 16

    start = mixed((seed + (number + 1) * golden) % wrap)
    for count in passes:
        start = mixed((start + (count + 1) * golden) % wrap)
    bits = [mixed((position * golden + start) % wrap) >> 1 for position in range(SHAPE[0] * SHAPE[1])]
    return np.array([b >= int(RATIO * 2**31) for b in bits]).reshape(SHAPE)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mask_is_a_function_of_seed_node_and_position(seed, runtime):
    masks = runtime(_two())({"x": np.ones(SHAPE, np.float32), "seed": np.array(seed)})
    for number, mask in enumerate(masks):
        np.testing.assert_array_equal(mask, _wanted(seed, number))
        np.testing.assert_array_equal(mask, dropout_mask(seed, number, SHAPE, RATIO))


@pytest.mark.parametrize("seed", SEEDS)
def test_and_of_the_pass(seed, runtime):
    (masks,) = runtime(_loop())({"x": np.ones(SHAPE, np.float32), "seed": np.array(seed)})
    # onnx.reference joins what a Loop's passes give out, without a dimension for the pass.
    for count, mask in enumerate(masks.reshape(PASSES, *SHAPE)):
        np.testing.assert_array_equal(mask, _wanted(seed, 0, [count]))
        np.testing.assert_array_equal(mask, dropout_mask(seed, 0, SHAPE, RATIO, [count]))


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_all_or_nothing(ratio):
    assert dropout_mask(3, 0, (1000,), ratio).all() == (ratio == 0)
    assert dropout_mask(3, 0, (1000,), ratio).any() == (ratio == 0)


def test_a_loaded_module_drops_by_its_seed(dynamo, monkeypatch):
    x = torch.ones(*SHAPE, requires_grad=True)
    module = exporter.load(exporter.export(nn.Sequential(nn.Dropout(0.3)).train(), (x.detach(),), dynamo=dynamo))
    monkeypatch.setattr("exporter.module.bound.draw_seed", lambda: torch.tensor(20240229))
    module(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.from_numpy(dropout_mask(20240229, 0, SHAPE, RATIO)).float() / 0.7)
