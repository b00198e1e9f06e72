"""A loop in Python whose steps write where the state lies: the same bits as a loop over a session, and no more memory than it says."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exporter
from exporter.cpu import in_place
from exporter.runtime.accelerate import accelerator
from exporter.training.artifacts import export_evaluation, write_artifacts
from exporter.training.step import export_training_step
from exporter.training.trainer import Trainer
from symbolics.errors import ArgumentError, ExportError, FormatError
from tests.exporter.training.loop import Custom, Square, batches_of, eager, network, run, step_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

ALLOW = ["tests.exporter.training.*"]


@pytest.fixture(autouse=True)
def _small_states_count(monkeypatch):
    monkeypatch.setattr(in_place, "FEW_BYTES", 1)


def _in_place(trainer):
    """What it writes in place; where onnxruntime is given no memory to write to, there is nothing to see."""
    if trainer._apart is None and not trainer._main.takes_room:
        pytest.xfail("this onnxruntime takes no vectors")
    return trainer._apart


def _fed(trainer, batches):
    names = (*trainer.layout.inputs, *trainer.layout.targets)
    return [trainer.step(dict(zip(names, batch, strict=True))) for batch in batches]


def _wide(dtype=torch.float32):
    """Layers whose updates are large enough for chains."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 80), nn.Tanh(), nn.Linear(80, 80), nn.Tanh(), nn.Linear(80, 3)).to(dtype)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": "adam"},
        {"optimizer": "lion"},
        {"optimizer": "sgd", "hyperparameters": {"momentum": 0.9, "weight_decay": 0.1}},
        {"optimizer": "sgd"},
        {"clip_norm": 0.1},
        {"accumulate": 2},
        {"precision": "float16"},
        {"recompute": 0},
        {"dynamo": False},
        {"ema": 0.9},
        {"optimizer": "nadam", "clip_value": 0.01},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "adamw",
)
def test_the_same_bits_as_a_loop_over_a_session(options):
    batches = batches_of(6, torch.float32)
    step = step_of(_wide(), batches[0], **options)
    losses, state = run(step, batches)
    trainer = Trainer(step)
    assert _fed(trainer, batches) == losses
    for name, array in state.items():
        np.testing.assert_array_equal(trainer._state[name].numpy(), array, err_msg=name)
    if accelerator(None) is not None and options.get("accumulate", 1) == 1 and options.get("precision") is None:
        # With averages a large weight's update leaves with its average alone, and the weight itself is written to new memory.
        assert ("state.2.weight.ema" if "ema" in options else "param.2.weight") in _in_place(trainer).written.values()


def test_as_eager_in_float64():
    batches = batches_of(8)
    model = network()
    step = step_of(model, batches[0], hyperparameters={"lr": 0.05})
    trainer = Trainer(step)
    expected = eager(model, F.cross_entropy, torch.optim.AdamW(model.parameters(), lr=0.05), batches)
    np.testing.assert_allclose(_fed(trainer, batches), expected, rtol=1e-12)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(trainer.state_dict()[key], value, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("accelerated")
def test_parameters_and_moments_stay_where_they_are():
    batches = batches_of(3, torch.float32)
    step = step_of(_wide(), batches[0])
    first = {name: array.copy() for name, array in step.initial.items()}
    trainer = Trainer(step)
    before = {name: trainer._state[name].data_ptr() for name in _in_place(trainer).written.values()}
    _fed(trainer, batches)
    assert len(before) >= 9
    assert before == {name: trainer._state[name].data_ptr() for name in before}
    assert all((trainer._state[name].numpy() != first[name]).any() for name in before)
    for name, array in first.items():
        np.testing.assert_array_equal(step.initial[name], array)  # the caller's own


def test_a_step_of_little_state_is_one_session(monkeypatch):
    monkeypatch.undo()
    batches = batches_of(2, torch.float32)
    trainer = Trainer(step_of(_wide(), batches[0]))
    assert trainer._update is None and trainer._apart is None
    assert _fed(trainer, batches) == run(step_of(_wide(), batches[0]), batches)[0]


def test_an_onnxruntime_that_takes_no_memory(monkeypatch):
    monkeypatch.setattr("exporter.runtime.tensors._push", lambda: None)
    batches = batches_of(3, torch.float32)
    step = step_of(_wide(), batches[0])
    trainer = Trainer(step)
    assert trainer._update is None
    assert _fed(trainer, batches) == run(step, batches)[0]


class _Failing(torch.autograd.Function):
    wanted = False

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        if _Failing.wanted:
            raise LookupError("backward")
        return g * 2


class _Around(nn.Module):
    """A Function between two layers."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 80), nn.Linear(80, 3), function

    def forward(self, x):
        return self.second(self.function.apply(self.first(x)))


def test_a_step_that_raises_has_changed_nothing():
    torch.manual_seed(0)
    batches = batches_of(2, torch.float32)
    trainer = Trainer(step_of(_Around(_Failing), batches[0]), allow=[_Failing])
    _fed(trainer, batches[:1])
    before = trainer.save()
    _Failing.wanted = True
    try:
        with pytest.raises(LookupError):
            _fed(trainer, batches[1:])
    finally:
        _Failing.wanted = False
    assert trainer.save() == before
    assert not trainer._main.session.store.contexts
    _fed(trainer, batches[1:])
    assert trainer.save() != before


def test_functions_of_ones_own():
    batches = batches_of(4, torch.float32)
    torch.manual_seed(0)
    step = step_of(Custom(), batches[0])
    trainer = Trainer(step, allow=[Square])
    assert _fed(trainer, batches) == run(step, batches, allow=[Square])[0]
    assert not trainer._main.session.store.contexts


@pytest.fixture
def artifacts(tmp_path):
    batches = batches_of(4, torch.float32)
    model = nn.Sequential(*_wide(), nn.BatchNorm1d(3), nn.Dropout(0.5))
    step = step_of(model, batches[0])
    evaluation = export_evaluation(model, batches[0][:1])
    write_artifacts(step, evaluation, tmp_path / "artifacts")
    step.save(tmp_path / "step.onnx")
    return model, step, evaluation, tmp_path, batches


@pytest.mark.usefixtures("accelerated")
def test_from_files(artifacts):
    model, step, evaluation, folder, batches = artifacts
    expected, state = run(step, batches)
    for trainer in (Trainer.load(folder / "artifacts"), Trainer.load(str(folder / "step.onnx")), Trainer(step, evaluation)):
        assert _fed(trainer, batches) == expected
        assert _in_place(trainer) is not None
        np.testing.assert_array_equal(trainer.state_dict()["2.weight"], state["param.2.weight"])
    (name,) = trainer.layout.inputs
    model.load_state_dict(trainer.state_dict())
    (outputs,) = trainer.evaluate({name: batches[0][0]}).values()
    with torch.no_grad():
        torch.testing.assert_close(outputs, model.eval()(batches[0][0]), rtol=1e-5, atol=1e-6)


def test_saved_and_restored(artifacts):
    _, step, _, folder, batches = artifacts
    trainer = Trainer.load(folder / "artifacts")
    _fed(trainer, batches[:2])
    saved = trainer.save()
    rest = _fed(trainer, batches[2:])
    again = Trainer(step)
    again.restore(saved)
    assert _fed(again, batches[2:]) == rest
    assert again.save() == trainer.save()
    head, values = saved.split(b"\n", 1)
    entries = json.loads(head)
    assert head.decode().startswith('[{"name":"') and ": " not in head.decode()  # as JSON.stringify writes it
    assert [entry["name"] for entry in entries] == list(step.initial)
    assert sum(entry["bytes"] for entry in entries) == len(values)
    other = saved.replace(b"param.0", b"param.9", 1)
    kinds = {
        saved[:-1]: "cut off at",
        saved + b"\0": "1 bytes behind",
        b"": "does not begin with",
        other: "another model or optimizer: it lacks",
    }
    for broken, says in kinds.items():
        before = again.save()
        with pytest.raises(ArgumentError, match=says):
            again.restore(broken)
        assert again.save() == before


def test_a_learning_rate_for_one_step():
    batches = batches_of(2, torch.float32)
    trainer = Trainer(step_of(_wide(), batches[0]))
    (x,), (target,) = trainer.layout.inputs, trainer.layout.targets
    before = trainer.state_dict()
    trainer.step({x: batches[0][0], target: batches[0][1], "learning_rate": 0.0})
    torch.testing.assert_close(trainer.state_dict(), before, rtol=0, atol=0)
    trainer.step({x: batches[0][0].numpy(), target: batches[0][1].tolist()})
    assert all((value != before[key]).any() for key, value in trainer.state_dict().items())


def test_the_norm_of_the_gradients_is_an_output():
    batches = batches_of(1, torch.float32)
    trainer = Trainer(step_of(_wide(), batches[0], clip_norm=1.0))
    _fed(trainer, batches)
    assert set(trainer.outputs) == {"gradient_norm"} and float(trainer.outputs["gradient_norm"]) > 0


def test_files_that_are_no_step(tmp_path):
    program = exporter.export(network(torch.float32), (torch.randn(2, 4),))
    program.save(tmp_path / "forward.onnx")
    with pytest.raises(FormatError, match="is no training step"):
        Trainer.load(tmp_path / "forward.onnx")
    with pytest.raises(FormatError):
        Trainer.load(tmp_path)
    batch = batches_of(1, torch.float32)[0]
    step_of(network(torch.float32), batch).save(tmp_path / "one.onnx")
    step_of(_wide(), batch, optimizer="sgd").save(tmp_path / "other.onnx")
    (tmp_path / "other.init.onnx").replace(tmp_path / "one.init.onnx")
    with pytest.raises(FormatError, match="must be of one step"):
        Trainer.load(tmp_path / "one.onnx")
    with pytest.raises(ExportError, match="another|both of one"):
        Trainer(step_of(network(torch.float32), batch), export_evaluation(nn.Linear(4, 3), batch[:1]))


def test_threads_take_turns():
    batches = batches_of(1, torch.float32) * 40
    step = step_of(_wide(), batches[0])
    trainer, alone = Trainer(step), Trainer(step)
    threads = [threading.Thread(target=_fed, args=(trainer, batches[:10])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _fed(alone, batches)
    assert trainer.save() == alone.save()


def test_a_buffer_that_forward_changes():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 80), nn.BatchNorm1d(80), nn.Linear(80, 3))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.inner(x) + self.calls

    torch.manual_seed(0)
    batches = batches_of(3, torch.float32)
    step = export_training_step(Counting(), batches[0][:1], loss=F.cross_entropy, targets=batches[0][1:])
    trainer = Trainer(step)
    assert _fed(trainer, batches) == run(step, batches)[0]
    assert float(trainer.state_dict()["calls"]) == 3


class _Scaled(nn.Module):
    """A buffer whose next value the gradient of the parameter is."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(80, 80))
        self.register_buffer("n", torch.zeros(80, 80))

    def forward(self, x):
        self.n += x.detach()
        return (self.w * self.n).sum()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_what_the_update_reads_is_carried_on_as_well(optimizer):
    torch.manual_seed(0)
    batches = [(torch.randn(80, 80),) for _ in range(3)]
    step = export_training_step(_Scaled(), batches[0], loss=None, optimizer=optimizer)
    losses, state = run(step, batches)
    trainer = Trainer(step)
    assert _fed(trainer, batches) == losses
    assert float(trainer.state_dict()["n"].abs().sum()) > 0
    for name, array in state.items():
        np.testing.assert_array_equal(trainer._state[name].numpy(), array, err_msg=name)
    assert set(trainer.outputs) == set()


@pytest.mark.usefixtures("accelerated")
def test_an_interrupt_leaves_no_half_state(monkeypatch, request):
    """Ctrl+C between what is written in place and what is carried on."""
    import signal

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored by what it starts in the background
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    batches = batches_of(2, torch.float32)
    step = step_of(nn.Sequential(*_wide(), nn.BatchNorm1d(3)), batches[0])
    trainer, other = Trainer(step), Trainer(step)
    assert _in_place(trainer) is not None
    _fed(other, batches[:1])
    written = trainer._write

    def interrupted(*given):
        signal.raise_signal(signal.SIGINT)
        written(*given)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(trainer, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _fed(trainer, batches[:1])
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert trainer.save() == other.save()
    assert _fed(trainer, batches[1:]) == _fed(other, batches[1:])


@pytest.mark.usefixtures("accelerated")
def test_shapes_that_the_file_lied_about_leave_no_half_state(monkeypatch):
    batches = batches_of(1, torch.float32)
    trainer = Trainer(step_of(_wide(), batches[0]))
    before = trainer.save()
    name = next(name for name in _in_place(trainer).added if name.endswith("_grad"))
    monkeypatch.setitem(trainer._apart.reads, name, (1, 2, 3))
    with pytest.raises(exporter.RunError, match="the step says .1, 2, 3."):
        _fed(trainer, batches)
    assert trainer.save() == before


class _Asking(torch.autograd.Function):
    ask = None

    @staticmethod
    def forward(ctx, x):
        if _Asking.ask is not None:
            _Asking.ask()
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_a_function_that_asks_in_the_middle_of_a_step():
    torch.manual_seed(0)
    batches = batches_of(1, torch.float32)
    trainer = Trainer(step_of(_Around(_Asking), batches[0]), allow=[_Asking])
    before, found = trainer.save(), []
    try:
        _Asking.ask = lambda: found.append(trainer.save())
        _fed(trainer, batches)
        assert found == [before]
        before = trainer.save()
        for call in (lambda: _fed(trainer, batches), lambda: trainer.restore(before)):
            _Asking.ask = call
            with pytest.raises(exporter.RunError, match="from within step"):
                _fed(trainer, batches)
            assert trainer.save() == before
    finally:
        _Asking.ask = None
    _fed(trainer, batches)


@pytest.mark.parametrize("fault", ["loss", "carried", "twice", "both"])
def test_layouts_that_lie(fault):
    batches = batches_of(1, torch.float32)
    step = step_of(_wide(), batches[0])
    (output, name), *_ = step.layout.carried.items()
    match fault:
        case "loss":
            layout = replace(step.layout, loss="other")
        case "carried":
            layout = replace(step.layout, carried={**step.layout.carried, "other": name})
        case "twice":
            layout = replace(step.layout, carried={**step.layout.carried, step.layout.loss: name})
        case "both":
            layout = replace(step.layout, loss=output)
    with pytest.raises(FormatError, match="its metadata"):
        Trainer(replace(step, layout=layout))


def test_files_that_are_no_initial_state(tmp_path):
    from onnx import TensorProto, helper, save

    step_of(_wide(), batches_of(1, torch.float32)[0]).save(tmp_path / "step.onnx")
    text = helper.make_node("Constant", [], ["t"], value=helper.make_tensor("t", TensorProto.STRING, [1], [b"text"]))
    same = helper.make_node("Identity", ["x"], ["t"])
    one = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    for nodes, inputs, kind, words in (
        ([text], [], TensorProto.STRING, "torch has no tensor for 't'"),
        ([same], [one], TensorProto.FLOAT, "it takes 'x'"),
    ):
        graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("t", kind, [1])])
        save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), tmp_path / "step.init.onnx")
        with pytest.raises(FormatError, match=words.replace("'", ".?")):
            Trainer.load(tmp_path / "step.onnx")
    with pytest.raises(FormatError):
        Trainer.load("a" * 5000)
    trainer = Trainer(step_of(_wide(), batches_of(1, torch.float32)[0]))
    with pytest.raises(ArgumentError, match="takes the bytes"):
        trainer.restore(None)


def test_options_of_ones_own():
    batches = batches_of(2, torch.float32)
    step = step_of(Custom(), batches[0])
    expected = run(step, batches, allow=[Square])[0]
    for takes_room in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not takes_room:
                patch.setattr("exporter.runtime.tensors._push", lambda: None)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            assert _fed(Trainer(step, allow=[Square], sess_options=options), batches) == expected
            assert _fed(Trainer(step, sess_options=exporter.session_options(allow=[Square])), batches) == expected
