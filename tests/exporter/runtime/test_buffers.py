"""Memory that onnxruntime reuses: what a call saved, kept or changed behind its back stays right, or is an error."""

from __future__ import annotations

import os

import onnx
import onnxruntime
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from exporter.runtime.session import inference_session
from symbolics.errors import RunError
from tests.exporter.runtime.build import forward, record, sandwich, training
from tests.exporter.runtime.runner import Runner
from tests.zoo import functions as F, hostile

ALLOW = ["tests.zoo.functions:*"]


@pytest.mark.parametrize("shape", [pytest.param((2, 4), id="2x4"), pytest.param((1 << 24,), id="64MB", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cls", [F.SavesInput, F.SavesOutput, F.SavesIntermediate, F.KeepsInputOnCtx, F.SavesNothing])
def test_gradients_where_ort_reuses_buffers(cls, shape):
    # Relu -> F -> Neg: ORT gives the memory of F's input and output to later nodes as soon as it may.
    x = torch.randn(shape)
    model = sandwich(cls, x)
    leaf = x.clone().requires_grad_()
    expected = -cls.apply(leaf.relu() * 0.5)
    seed = torch.randn(shape)
    (expected_gradient,) = torch.autograd.grad(expected, leaf, seed)
    runner = Runner(model)
    for run in range(50 if len(shape) == 2 else 3):
        y, gradient = runner.run(x, seed)
        if run in (0, 1, 2, 49):
            torch.testing.assert_close(y, expected.detach(), rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-7)
    assert len(runner.store) == 0


@pytest.mark.parametrize("size", [8, 1 << 15])
@pytest.mark.parametrize("cls", [F.ChangesInput, F.ChangesInputThroughNumpy])
def test_an_undeclared_change_never_reaches_another_node(cls, size):
    x = torch.randn(size)
    call = record(cls, x[:8].clone().requires_grad_())
    model = forward(call)
    graph = model.graph
    graph.node[0].input[0] = "weight"
    del graph.input[:], graph.output[1:]
    graph.node[0].output[1] = "y"
    graph.node.append(onnx.helper.make_node("Identity", ["weight"], ["other"]))
    graph.initializer.append(onnx.numpy_helper.from_array(x.numpy(), "weight"))
    del graph.output[:]
    graph.output.extend([onnx.helper.make_tensor_value_info(name, 1, None) for name in ("y", "other")])
    runner = Runner(model)
    for _ in range(4):
        y, other = runner.run()
        assert torch.equal(y, x * 2)
        assert torch.equal(other, x)


def test_large_inputs_are_read_in_place_once_a_run_has_shown_that_nobody_keeps_them():
    seen.clear()
    x = torch.randn(1 << 16, requires_grad=True)
    for context in (False, True):
        session = inference_session(forward(record(Watches, x), context=context), [Watches])
        value = onnxruntime.OrtValue.ortvalue_from_numpy(x.detach().numpy())
        seen.clear()
        for _ in range(3):
            session.run_with_ort_values(None, {"x0": value})
        assert seen[0] != value.data_ptr()
        assert seen[1:] == [value.data_ptr()] * 2


seen: list[int] = []
kept: list[torch.Tensor] = []


class Watches(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        seen.append(x.data_ptr())
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class KeepsLater(torch.autograd.Function):
    runs = 0

    @staticmethod
    def forward(ctx, x):
        KeepsLater.runs += 1
        if KeepsLater.runs in (3, 4):
            kept.append(x)
        return x * 2


@pytest.mark.parametrize("how", ["keeps", "changes"])
def test_a_change_of_habit_is_an_error_once_and_right_from_then_on(how):
    x = torch.randn(1 << 16)
    cls = KeepsLater if how == "keeps" else F.ChangesLater
    model = forward(record(cls, x))
    cls.runs = 0
    runner = Runner(model, allow=[cls])
    runner.run(x)
    runner.run(x)
    with pytest.raises(RunError, match="kept an input" if how == "keeps" else "changed an input"):
        runner.run(x.clone())
    (y,) = runner.run(x)
    assert torch.equal(y, x * 2)
    kept.clear()


# --------------------------------------------------------------------------------- what is kept gets memory of its own


@pytest.fixture
def _calm():
    onnxruntime.set_default_logger_severity(4)
    yield
    onnxruntime.set_default_logger_severity(2)
    hostile.Keeps.how = hostile.Refuses.how = ""
    hostile.Keeps.kept.clear()


class _Fed:
    """A session that reads the caller's memory: what a test writes there afterwards, a view would show."""

    def __init__(self, model, size=1 << 16):
        self.session = inference_session(model, ["tests.zoo.hostile:*"])
        self.feeds = {
            value.name: torch.arange(size, dtype=torch.float32) if value.name == "x0" else torch.ones(size)
            for value in self.session.get_inputs()
        }

    def run(self):
        return self.session.run_with_ort_values(
            None, {name: onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy()) for name, tensor in self.feeds.items()}
        )

    def overwrite(self):
        for tensor in self.feeds.values():
            tensor.fill_(-7)


def _values(kept):
    if isinstance(kept, torch.UntypedStorage):
        return torch.empty(0).set_(kept)
    if kept.dtype is torch.int32:
        return kept.view(torch.float32)
    return kept


@pytest.mark.usefixtures("_calm")
@pytest.mark.parametrize(
    ("how", "room"),
    [
        *((how, True) for how in (*hostile.KEPT, "keeps a gradient", "saves", "saves a slice")),
        # Without room for shared memory, tensors are helped that Python knows.
        *((how, False) for how in ("keeps it", "keeps a slice", "keeps it detached", "keeps a gradient")),
    ],
)
def test_what_a_later_run_keeps_never_points_into_the_memory_of_the_runtime(how, room, monkeypatch):
    if not room:
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255)))
    hostile.Keeps.how = ""
    with_gradient = how in ("keeps a gradient", "saves", "saves a slice")
    x = torch.ones(1 << 16, requires_grad=with_gradient)
    call = record(hostile.Keeps, x)
    fed = _Fed(training(call) if with_gradient else forward(call))
    fed.run()
    hostile.Keeps.how = how
    if with_gradient and how != "keeps a gradient":
        graphs = []
        hook = torch.autograd.graph.saved_tensors_hooks(lambda saved: graphs.append(saved) or saved, lambda saved: saved)
        with hook, pytest.raises(RunError, match="kept an input"):
            fed.run()
        kept = graphs
    else:
        with pytest.raises(RunError, match="kept an input"):
            fed.run()
        kept = hostile.Keeps.kept
    assert len(fed.session.store) == 0
    hostile.Keeps.how = ""
    fed.overwrite()
    assert len(kept) == 1
    found = kept[0]
    if how == "keeps a graph":
        (gradient,) = torch.autograd.grad(found.sum(), found.grad_fn.next_functions[0][0].variable)
        torch.testing.assert_close(gradient, torch.arange(1, 1 << 16, dtype=torch.float32).cos())
        return
    values = _values(found.detach() if isinstance(found, torch.Tensor) else found)
    expected = torch.ones(1 << 16) if how == "keeps a gradient" else torch.arange(1 << 16, dtype=torch.float32)
    assert torch.equal(values, expected[expected.numel() - values.numel() :])
    del kept, found, values
    hostile.Keeps.kept.clear()
    for tensor in fed.feeds.values():
        tensor.fill_(2)
    y, *_ = fed.run()
    assert torch.equal(torch.from_numpy(y.numpy()), torch.full((1 << 16,), 4.0))


@pytest.mark.usefixtures("_calm")
@pytest.mark.parametrize("length", [1, 5])
def test_what_an_exception_holds_never_points_into_the_memory_of_the_runtime(length):
    fed = _Fed(forward(record(hostile.Refuses, torch.ones(1 << 16)), repeat=length))
    fed.run()
    hostile.Refuses.how = "refuses"
    with pytest.raises(hostile.Refusal) as caught:
        fed.run()
    fed.overwrite()
    assert torch.equal(caught.value.held, torch.arange(1, 1 << 16, dtype=torch.float32))


@pytest.mark.usefixtures("_calm")
def test_a_failure_alone_copies_no_input(monkeypatch):
    """The frames of the exception hold the inputs; only who really keeps one pays for a copy."""
    fed = _Fed(forward(record(hostile.Refuses, torch.ones(1 << 16))))
    fed.run()
    seen: list[StorageWeakRef] = []

    def refusal(text, held):
        seen.append(StorageWeakRef(held.untyped_storage()))
        return KeyError(text)

    monkeypatch.setattr(hostile, "Refusal", refusal)
    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", None)  # whoever needs it fails
    hostile.Refuses.how = "refuses"
    with pytest.raises(KeyError):
        fed.run()
    assert seen[0].expired()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads what Linux says about the memory of a process")
def test_reading_in_place_leaves_nothing_behind():
    """Weak references to storages are taken back: each would keep a little memory."""
    session = inference_session(forward(record(F.SavesNothing, torch.ones(1 << 14))), ALLOW)
    feeds = {"x0": torch.ones(1 << 14).numpy()}
    for _ in range(1000):
        session.run(None, feeds)
    tracked = _resident()
    for _ in range(20_000):
        session.run(None, feeds)
    assert _resident() - tracked < 1 << 20


def _resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
