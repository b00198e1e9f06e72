"""The file of a training step, and what is refused instead of one."""

from __future__ import annotations

import io
import os
import re

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import exporter
from exporter.commands.inspect import render
from exporter.files.inspect import inspect_model
from exporter.training.step import export_training_step
from symbolics.errors import ArgumentError, ExportError, FormatError
from symbolics.node.metadata import read_step
from symbolics.node.names import STATE_KEY
from tests.exporter.training.loop import Custom, batches_of, eager, network, step_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class TestFile:
    def test_saved_beside_the_model_that_gives_the_start(self, tmp_path):
        model, batches = network(torch.float32), batches_of(3, torch.float32)
        step = step_of(model, batches[0], optimizer="adam")
        step.save(tmp_path / "step.onnx")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step.init.onnx", "step.onnx"]
        proto = onnx.load(tmp_path / "step.onnx")
        onnx.checker.check_model(proto, full_check=True)
        initial = exporter.inference_session(tmp_path / "step.init.onnx")
        values = dict(zip([o.name for o in initial.get_outputs()], initial.run(None, {}), strict=True))
        assert set(values) == set(step.initial)
        for name, array in step.initial.items():
            np.testing.assert_array_equal(values[name], array)
        inputs = {value.name for value in proto.graph.input}
        assert inputs == {*values, "input", "target"}
        layout = read_step({entry.key: entry.value for entry in proto.metadata_props})
        assert layout == step.layout
        assert {value.name for value in proto.graph.output} == {"loss", *layout.carried}
        assert all(output == f"{name}.next" for output, name in layout.carried.items())

    @pytest.mark.parametrize("failure", ["of the step", "of its dialect", "between the two"])
    def test_both_or_neither(self, tmp_path, failure, monkeypatch):
        step = step_of(network(torch.float32), batches_of(1, torch.float32)[0])
        for name in ("step.onnx", "step.init.onnx"):
            (tmp_path / name).write_text("old")
        if failure == "of the step":
            (tmp_path / "step.onnx").unlink()
            (tmp_path / "step.onnx").mkdir()
        elif failure == "between the two":
            replace = os.replace
            monkeypatch.setattr(os, "replace", lambda old, new: full() if new.name == "step.onnx" else replace(old, new))

        def full():
            raise OSError(28, "No space left on device")

        with pytest.raises(ExportError):
            step.save(tmp_path / "step.onnx", schema="no such" if failure == "of its dialect" else None, external_data=True)
        assert sorted(os.listdir(tmp_path)) == ["step.init.onnx", "step.onnx"]
        assert (tmp_path / "step.init.onnx").read_text() == "old"

    def test_with_data(self, tmp_path):
        """Two models, of which one has data: the weights of the step are inputs."""
        step = step_of(nn.Linear(9, 9), (torch.randn(4, 9), torch.zeros(4, dtype=torch.int64)))
        for _ in range(2):
            step.save(tmp_path / "step.onnx", external_data=True)
        names = {re.sub("[0-9a-f]{16}", "DIGEST", name) for name in os.listdir(tmp_path)}
        assert names == {"step.onnx", "step.init.onnx", "step.init.onnx.DIGEST.data"}
        assert len(os.listdir(tmp_path)) == 3
        start = exporter.inference_session(tmp_path / "step.init.onnx")
        for value, got in zip(start.get_outputs(), start.run(None, {}), strict=True):
            np.testing.assert_array_equal(got, step.initial[value.name])

    def test_a_plain_session_runs_it(self, tmp_path):
        model, batches = network(torch.float32), batches_of(1, torch.float32)
        step = step_of(model, batches[0])
        step.save(tmp_path / "step.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "step.onnx", providers=["CPUExecutionProvider"])
        x, y = (t.numpy() for t in batches[0])
        (loss,) = session.run(["loss"], {**step.initial, "input": x, "target": y})
        np.testing.assert_allclose(loss, F.cross_entropy(model(batches[0][0]), batches[0][1]).detach(), rtol=1e-5)

    def test_sessions_of_steps_share_an_arena(self):
        """And nobody else's session does, nor one whose options the user brings."""

        def entry(session):
            options = session.get_session_options()
            try:
                return options.get_session_config_entry("session.use_env_allocators"), options.enable_mem_pattern
            except RuntimeError:  # onnxruntime's word for an entry that is not there
                return None, options.enable_mem_pattern

        model, (batch,) = network(torch.float32), batches_of(1, torch.float32)
        step = step_of(model, batch)
        sessions = [exporter.inference_session(step), exporter.inference_session(step)]
        assert [entry(session) for session in sessions] == [("1", False), ("1", False)]
        plain = exporter.inference_session(exporter.export(model, batch[:1]))
        assert entry(plain) == (None, True)
        own = exporter.inference_session(step, sess_options=onnxruntime.SessionOptions())
        assert entry(own) == (None, True)
        feeds = {**step.initial, "input": batch[0].numpy(), "target": batch[1].numpy()}
        losses = [session.run([step.layout.loss], feeds)[0] for session in (*sessions, own)]
        assert losses[0] == losses[1] == losses[2]

    def test_a_fresh_process_runs_its_functions(self, tmp_path, fresh):
        torch.manual_seed(0)
        model, batches = Custom(), batches_of(1, torch.float32)
        step = step_of(model, batches[0], optimizer="sgd", hyperparameters={"lr": 0.05})
        step.save(tmp_path / "step.onnx")
        x, y = batches[0]
        values = fresh.run(tmp_path / "step.onnx", {**step.initial, "x": x, "target": y}, allow=[f"{Custom.__module__}:*"])
        results = dict(zip([value.name for value in step.model.graph.outputs], values, strict=True))
        eager(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.05), batches)
        np.testing.assert_allclose(results["param.first.weight.next"], model.first.weight.detach(), rtol=1e-5, atol=1e-6)

    def test_two_exports_are_equal(self, tmp_path):
        for name in ("a", "b"):
            step_of(network(torch.float32), batches_of(1, torch.float32)[0]).save(tmp_path / f"{name}.onnx")
        assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()

    def test_inspect_says_what_it_is(self, tmp_path):
        class Inner(nn.Module):
            def __init__(self):
                super().__init__()
                self.part, self.spare = Custom(), nn.Linear(1, 1)

            def forward(self, x):
                return self.part(x)

        step = step_of(Inner(), batches_of(1, torch.float32)[0], optimizer="lion")
        report = inspect_model(step.model)
        assert report.step == step.layout
        assert report.rows[0].module == "part"
        console = Console(width=200, file=io.StringIO())
        console.print(render(report))
        text = console.file.getvalue()
        assert "lion: takes x, target; trains 4 parameters" in text
        assert "spare.weight, spare.bias" in text

    def test_damaged_layouts_are_refused(self):
        for text in ("{}", "[]", "nonsense", '{"carried": 1}'):
            with pytest.raises(FormatError, match=r"pythonop\.step"):
                read_step({"pythonop.step": text})

    def test_a_step_is_no_model_to_load(self):
        step = step_of(network(torch.float32), batches_of(1, torch.float32)[0])
        with pytest.raises(FormatError, match="training step"):
            exporter.load(step)

    def test_state_of_the_file_names_what_is_left(self):
        step = step_of(network(torch.float32), batches_of(1, torch.float32)[0])
        assert step.model.metadata_props[STATE_KEY] == "{}"


class _Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.calls = torch.zeros(())

    def forward(self, x):
        self.calls = self.calls + 1
        return self.linear(x) * self.calls


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"optimizer": "adamW2"}, "no optimizer 'adamW2'.*did you mean 'adamw'"),
            ({"optimizer": 3}, "optimizer is of type int"),
            ({"hyperparameters": {"momentun": 1}, "optimizer": "sgd"}, "no hyperparameter 'momentun'.*did you mean 'momentum'"),
            ({"hyperparameters": {"betas": 0.9}}, "betas is 0.9, not two numbers"),
            ({"hyperparameters": {"amsgrad": True}, "optimizer": "sgd"}, "no hyperparameter 'amsgrad'"),
            ({"hyperparameters": {"lr": -1.0}}, "adamw: Invalid learning rate: -1.0"),
            ({"hyperparameters": {"nesterov": True}, "optimizer": "sgd"}, "sgd: Nesterov momentum requires a momentum"),
            ({"precision": "float8"}, "precision is 'float8'"),
            ({"accumulate": 0}, "accumulate is 0"),
            ({"clip_norm": -1.0}, "clip_norm is -1.0"),
            ({"clip_value": 0.0}, "clip_value is 0.0"),
            ({"ema": 1.0}, "ema is 1.0"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(ArgumentError, match=message):
            step_of(network(torch.float32), batches_of(1, torch.float32)[0], **options)

    def test_optimizer_of_another_model(self):
        with pytest.raises(ArgumentError, match="that the model has not"):
            step_of(network(), batches_of(1)[0], optimizer=torch.optim.SGD(network().parameters()))

    def test_optimizers_without_a_step(self):
        model = network()
        with pytest.raises(ArgumentError, match="no optimizer 'Adamax'"):
            step_of(model, batches_of(1)[0], optimizer=torch.optim.Adamax(model.parameters()))

    def test_losses_that_are_no_number(self):
        model, (x, y) = network(), batches_of(1)[0]
        with pytest.raises(ExportError, match=r"shape \[5\].*reduce it"):
            export_training_step(model, (x,), loss=lambda a, b: F.cross_entropy(a, b, reduction="none"), targets=(y,))
        with pytest.raises(ExportError, match="the model .*loss=None.* returned a tensor"):
            export_training_step(model, (x,), loss=None)
        with pytest.raises(ArgumentError, match="loss is of type str"):
            export_training_step(model, (x,), loss="mse", targets=(y,))
        with pytest.raises(ArgumentError, match="labels belong to args"):
            export_training_step(model, (x,), loss=None, targets=(y,))

    def test_nothing_to_train(self):
        with pytest.raises(ExportError, match="nothing to train"):
            step_of(network().requires_grad_(False), batches_of(1)[0])

    @pytest.mark.filterwarnings("ignore:forward changes state")
    def test_state_that_the_graph_cannot_carry(self):
        with pytest.raises(ExportError, match="a forward changes 'calls', and the step cannot carry it: it is an attribute"):
            step_of(_Counting(), batches_of(1, torch.float32)[0])

    def test_arguments_that_do_not_fit(self):
        with pytest.raises(ExportError, match="cannot be called with the example arguments"):
            export_training_step(network(), (1, 2, 3), loss=F.cross_entropy, targets=())
