"""A session on torch tensors: every type and shape goes there and comes back, by whichever way it takes."""

from __future__ import annotations

import types
from concurrent.futures import ThreadPoolExecutor

import onnxruntime
import pytest
import torch
from onnx import helper
from torch.utils.dlpack import from_dlpack

from exporter.runtime import tensors
from exporter.runtime.session import inference_session
from exporter.runtime.tensors import LARGE, Runner, TensorPool, tensor
from symbolics.errors import FormatError, RunError
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


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (1200, 1100)], ids=str)
def test_outputs_go_where_there_is_room(kind, shape):
    runner = _runner(kind, len(shape))
    if not runner.takes_room:
        pytest.xfail("this onnxruntime takes no vectors")
    x, room = torch.ones(shape, dtype=kind), TensorPool().empty(shape, kind)
    assert room.shape == shape and room.dtype is kind and (room.data_ptr() % 64 == 0 or not x.numel())
    room.zero_()
    found, handles = runner.run_owning([x], [room])
    assert torch.equal(room, x) and not handles
    assert found[0].data_ptr() == room.data_ptr() or not x.numel()
    del found
    assert torch.equal(room, x)


def test_room_of_another_shape_is_an_error():
    runner = _runner(torch.float32, 2)
    if not runner.takes_room:
        pytest.xfail("this onnxruntime takes no vectors")
    with pytest.raises(RunError):
        runner.run_owning([torch.ones(2, 3)], [torch.empty(3, 3)])


def test_a_pool_gives_nobody_what_somebody_has():
    pool, shape = TensorPool(), (LARGE // 4 + 1,)
    first = pool.empty(shape, torch.float32)
    place = first.data_ptr()
    second = pool.empty(shape, torch.float32)
    assert second.data_ptr() != place
    for hold in (
        lambda t: t[5:6],
        lambda t: t.detach(),
        lambda t: t.numpy(),
        lambda t: torch.utils.dlpack.to_dlpack(t),
        lambda t: t.untyped_storage(),
    ):
        kept = hold(first)
        del first
        assert pool.empty(shape, torch.float32).data_ptr() != place
        del kept
        first = pool.empty(shape, torch.float32)
        assert first.data_ptr() == place


def test_a_pool_uses_memory_again():
    pool, shape = TensorPool(), (LARGE // 8, 2)
    places = set()
    for dtype in (torch.float32, torch.int32, torch.float32):
        found = pool.empty(shape, dtype)
        assert found.shape == shape and found.dtype is dtype and found.is_contiguous()
        places.add(found.data_ptr())
        del found
    assert len(places) == 1
    small = [pool.empty((3,), torch.float32) for _ in range(2)]
    assert small[0].data_ptr() != small[1].data_ptr()


def test_threads_get_memory_of_their_own():
    pool = TensorPool()

    def work(number):
        for _ in range(50):
            found = pool.empty((LARGE,), torch.uint8)
            found[::4096] = number
            if not (found[::4096] == number).all():
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_strings_are_told():
    """A damaged file may say that a node gives numbers, and give strings."""
    graph = helper.make_graph(
        [helper.make_node("Constant", [], ["y"], value_strings=["a"])], "g", [], [helper.make_tensor_value_info("y", 8, [1])]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    (found,) = onnxruntime.InferenceSession(model.SerializeToString()).run_with_ort_values(None, {})
    value = found._ortvalue
    with pytest.raises(FormatError, match="a tensor of STRING, which torch has none of, .*: the file is damaged"):
        tensor(value)
