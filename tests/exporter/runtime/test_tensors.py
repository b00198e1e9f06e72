"""A session on torch tensors: every type and shape goes there and comes back, by whichever way it takes."""

from __future__ import annotations

import types

import pytest
import torch
from onnx import helper
from torch.utils.dlpack import from_dlpack

from exporter.runtime import tensors
from exporter.runtime.session import inference_session
from exporter.runtime.tensors import Runner, tensor
from symbolics.node.dtypes import DTYPES, onnx_type

CPU = torch.device("cpu")
#: What onnxruntime has an Identity of.
KINDS = [d for d in DTYPES.values() if not d.is_complex and d.itemsize in (1, 2, 4, 8)]
SHAPES = [(2, 3), (), (0, 3), (3, 0, 2), (1, 3), (3, 1)]


def _runner(kind, rank=None, to=None):
    """y = x, or x cast to another type."""
    shape = [None] * rank if rank is not None else None
    kinds = [int(onnx_type(kind)), int(onnx_type(to or kind))]
    values = [helper.make_tensor_value_info(name, number, shape) for name, number in zip("xy", kinds, strict=True)]
    node = helper.make_node("Identity", ["x"], ["y"]) if to is None else helper.make_node("Cast", ["x"], ["y"], to=kinds[1])
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    return Runner(inference_session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)), CPU)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_type_and_shape(kind):
    runners = {}
    for shape in SHAPES:
        runner = runners.setdefault(len(shape), _runner(kind, len(shape)))
        x = torch.randint(0, 2, shape).to(kind)
        for found in (tensor(runner.run({"x": x})["y"]), *runner.tensors(runner.run_owning([x])[0], [0])):
            assert found.dtype is kind
            assert found.shape == x.shape
            assert torch.equal(found.float(), x.float())
    again = tensor(runner.run({"x": runner.run({"x": x})["y"]})["y"])  # a value of onnxruntime passes through
    assert torch.equal(again.float(), x.float())


def test_the_ways_agree(monkeypatch):
    """The binding is what devices, float8 and older releases of onnxruntime take."""
    x = torch.randn(4, 5)
    runner = _runner(torch.float32, 2)
    assert runner._vector is not None or not hasattr(onnx_values(), "from_dlpack")
    by_vector = tensor(runner.run({"x": x})["y"])
    monkeypatch.setattr(runner, "_vector", None)
    assert torch.equal(tensor(runner.run({"x": x})["y"]), by_vector)
    assert _runner(torch.float8_e4m3fn)._vector is None


class Vector(list):
    """onnxruntime's vector of values, which says of each of what type it was given."""

    def add(self, capsule, flagged):
        found = from_dlpack(capsule)
        kind = {torch.uint8: "bool" if flagged else "uint8", torch.bool: "bool", torch.float32: "float"}[found.dtype]
        self.append(types.SimpleNamespace(data_type=lambda: f"tensor({kind})"))


class Flagged(Vector):
    def push_back(self, capsule, is_bool):
        self.add(capsule, is_bool)


class Plain(Vector):
    def push_back(self, capsule):
        self.add(capsule, False)


class Silent(Vector):
    def push_back(self, value, *rest):
        raise TypeError("incompatible function arguments")


@pytest.mark.parametrize(("vector", "way"), [(Flagged, tensors._push_flagged), (Plain, tensors._push_plain), (Silent, None)])
def test_the_way_into_a_vector_is_found_by_trying(vector, way, monkeypatch):
    """onnxruntime 1.32 took the flag away: every loaded file failed."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    monkeypatch.setattr(state, "OrtValueVector", vector)
    assert tensors._push.__wrapped__() is way


def test_this_onnxruntime_has_a_way_into_a_vector():
    assert tensors._push() is not None or not hasattr(onnx_values(), "from_dlpack")


def test_values_pass_from_one_way_to_the_other():
    x = torch.tensor([[1.0, -2.0, 0.5]])
    narrow, wide = _runner(torch.float32, 2, to=torch.float8_e4m3fn), _runner(torch.float8_e4m3fn, 2, to=torch.float32)
    assert wide._vector is None
    found = narrow.run({"x": x})["y"]
    assert tensor(found).dtype is torch.float8_e4m3fn
    back = wide.run({"x": found})["y"]
    assert torch.equal(tensor(back), x)
    assert torch.equal(tensor(_runner(torch.float32, 2).run({"x": back})["y"]), x)


def onnx_values():
    from onnxruntime.capi.onnxruntime_pybind11_state import OrtValue

    return OrtValue


def test_a_runner_holds_on_to_nothing():
    runner = _runner(torch.float32, 2)
    x = torch.randn(64, 64)
    before = x._use_count()
    y = runner.run({"x": x})
    del y
    assert x._use_count() == before


@pytest.mark.parametrize("vector", [True, False])
def test_a_tensor_that_does_not_lie_as_it_reads_is_read_as_it_reads(vector, monkeypatch):
    runner, complex_ = _runner(torch.float32, 2), torch.randn(4, 5, dtype=torch.complex64)
    if not vector:
        monkeypatch.setattr(runner, "_vector", None)
    for x in (torch.randn(4, 5).T, torch.randn(1, 5).expand(4, 5), complex_.conj().imag, complex_.conj().imag.contiguous().T):
        assert torch.equal(tensor(runner.run({"x": x})["y"]), x)
        assert torch.equal(runner.tensors(runner.run_owning([x])[0], [0])[0], x)
