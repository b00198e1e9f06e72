"""Dropout from a seed: the masks are the documented function of seed, node, passes and position, on every runtime.

tests/exporter/runtime/test_versions.py runs these tests on other releases of onnxruntime as well.
"""

from __future__ import annotations

import hashlib

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


def _wanted(seed, number=0, passes=(), shape=SHAPE, ratio=RATIO):
    """docs/format.md, on Python's integers."""

    def constants(name, *dims):
        count = int(np.prod(dims))
        found = hashlib.shake_128(name.encode()).digest(2 * count)
        return np.array([int.from_bytes(found[2 * i : 2 * i + 2], "little") % 4096 for i in range(count)]).reshape(dims).tolist()

    def stir(x, more):
        return (x * x // 64 + more) % 4096

    def numbers(index):
        low, high, found = index % 4096, index // 4096, []
        for c0, *more in zip(*constants("table", 5, 4)):
            x = (low + c0) % 4096
            for part, constant in zip((high, low, high, low), more):
                x = stir(x, part + constant)
            found.append(x)
        return found

    s0, s1, s2 = seed % 4096, (seed >> 12) % 4096, (seed >> 24) % 128
    keys = [(x + s0) % 4096 for x in constants(f"node {number}", 4)]
    for more in ([s1] * 4, [s2] * 4, *constants("seed", 2, 4)):
        keys = [stir(x, m) for x, m in zip(keys, more)]
    for count in passes:
        for more in ([count % 4096] * 4, [count >> 12] * 4, *constants("pass", 2, 4)):
            keys = [stir(x, m) for x, m in zip(keys, more)]
    size, found = int(np.prod(shape)), []
    columns = [numbers(c) for c in range(min(4096, size))]
    for row in range(-(-size // 4096)):
        a = [x + k for x, k in zip(numbers(4096 + row), keys)]
        for b in columns[: size - 4096 * row]:
            x = stir(stir((a[0] + b[0]) % 4096, a[1]), b[2])
            found.append((x * x + 64 * (a[3] + b[3]) + b[1] // 64) % 2**18)
    return np.array([bits >= ratio * 2**18 for bits in found]).reshape(shape)


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


def _correlation(a, b):
    return np.corrcoef(a.ravel(), b.ravel())[0, 1] * np.sqrt(a.size)  # about normal where they are independent


@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_masks_look_random(ratio):
    """Each figure is about a standard normal number for random masks: 7 is beyond what any of so many reaches."""
    size = 256 * 4096
    mask = dropout_mask(7, 3, (256, 4096), ratio)
    z = (mask - (1 - ratio)) / np.sqrt(ratio * (1 - ratio))
    assert abs(z.mean()) * np.sqrt(size) < 7
    for width in (1, 8, 64, 1000, 4096):  # runs of elements, and columns of every layout
        grid = z.ravel()[: size // width * width].reshape(-1, width)
        for sums, count in ((grid.sum(1) / np.sqrt(width), len(grid)), (grid.sum(0) / np.sqrt(len(grid)), width)):
            if count > 7:
                assert abs(sums.var() - 1) * np.sqrt(count / 2) < 7 + (ratio < 0.2) * np.sqrt(10 / width)
    spectrum = np.abs(np.fft.rfft(z.ravel())) ** 2 / size
    assert spectrum[1:].max() < 2 * np.log(size)
    assert (np.abs(np.fft.fft2(z)) ** 2 / size).max() < 2 * np.log(size)
    shifted = np.fft.irfft(np.abs(np.fft.rfft(z.ravel(), 2 * size)) ** 2)[1:100_000] / np.sqrt(size)
    assert np.abs(shifted).max() < 7


def test_masks_of_seeds_nodes_and_passes_have_nothing_in_common():
    masks = [dropout_mask(seed, 0, (256, 256), 0.5) for seed in (0, 1, 2, 4096, 2**24)]
    masks += [dropout_mask(0, number, (256, 256), 0.5) for number in (1, 2, 100)]
    masks += [dropout_mask(0, 0, (256, 256), 0.5, passes) for passes in ([0], [1], [0, 1], [1, 0], [4096])]
    assert max(abs(_correlation(a, b)) for i, a in enumerate(masks) for b in masks[:i]) < 6
    transposed = dropout_mask(0, 0, (4096, 4096), 0.5)
    assert abs(_correlation(transposed, transposed.T)) < 10  # each pair counts twice


@pytest.mark.parametrize("shape", [(3, 5000), (4, 0), (0, 5)])
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "static"])
def test_a_mask_of_open_sizes_of_many_rows_and_of_none(shape, is_open):
    nodes = [helper.make_node("Dropout", ["x", "p", "t"], ["y", "first"])]
    value, dims = helper.make_tensor_value_info, ["n", "m"] if is_open else shape
    constants = _constants(p=(FLOAT, RATIO), t=(BOOL, True))
    graph = helper.make_graph(nodes, "g", [value("x", FLOAT, dims)], [value("first", BOOL, dims)], constants)
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    seed_dropout(model)
    (mask,) = _on_onnxruntime(ir.to_proto(model))({"x": np.ones(shape, np.float32), "seed": np.array(5)})
    np.testing.assert_array_equal(mask, dropout_mask(5, 0, shape, RATIO))
    np.testing.assert_array_equal(mask, _wanted(5, shape=shape))
