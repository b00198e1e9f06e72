"""The state_dict of a trained file is eager's, whole: also what no node reads, whoever made the steps."""

from __future__ import annotations

import json
import os

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn

import exporter
from exporter.cli import main
from exporter.files.trained import EVALUATION, MANIFEST, UNREAD
from symbolics.errors import FormatError
from tests.exporter.training.javascript import in_node, write_batches

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

both = pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])


class _Network(nn.Module):
    """All kinds of state: read always, in training alone, or never. TorchScript has no complex numbers: a ``real`` one reads none."""

    def __init__(self, real=True):
        super().__init__()
        self.real = real
        torch.manual_seed(0)
        self.body, self.frozen, self.counting, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.head.weight
        self.aside = nn.Linear(4, 2)  # for the loss in training alone
        self.spare, self.spare_frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("calls", torch.tensor(5))
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("unread_seen", torch.zeros(4))
        self.register_buffer("fading", torch.ones(4), persistent=False)
        self.register_buffer("fading_seen", torch.zeros(4), persistent=False)
        self.register_buffer("fading_unread", torch.ones(2), persistent=False)
        self.register_buffer("twist", torch.tensor([1 + 2j, 3 - 1j]))
        self.register_buffer("twist_unread", torch.tensor([[1j]]))
        self.register_buffer("bits", torch.tensor([1, 200], dtype=torch.uint8))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("twin", self.calls)
        for _ in range(7):
            self.frozen(torch.randn(4, 4))
        self.frozen.requires_grad_(False).eval()

    def forward(self, x):
        y = self.counting(self.frozen(self.body(x))) * self.fading + self.fading_seen
        y = self.tied(torch.tanh(self.head(y + self.seen)))
        if not self.real:
            y = y * torch.view_as_real(self.twist).sum() / 5
        if self.training:
            self.seen.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            self.unread_seen.add_(1)
            self.fading_seen.mul_(0.5).add_(y.detach().mean(0), alpha=0.01)
            y = y + F.pad(self.aside(y), (0, 2))
        return y


class _Loss(nn.Module):
    """With tensors of its own, which belong to no model."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 1.0, 0.5]))
        self.register_buffer("unused", torch.ones(2))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, y, target):
        return F.cross_entropy(self.norm(y) * self.scale, target, weight=self.weights)


def _model(dynamo=False):
    model = _Network(real=not dynamo).train()
    model.frozen.eval()
    return model


def _batches(count):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 3, generator=generator), torch.randint(0, 4, (8,), generator=generator)) for _ in range(count)]


def _options(batch, dynamo):
    return {"loss": _Loss().train(), "targets": batch[1:], "dynamo": dynamo, "output_names": ["scores"]}


def _written(folder, batch, *, dynamo, with_loss=True, provider=None, **options):
    model, shared = _model(dynamo), _options(batch, dynamo)
    step = exporter.export_training_step(model, batch[:1], optimizer="sgd", hyperparameters={"lr": 0.1}, **shared, **options)
    left_out = () if with_loss else ("loss", "targets")
    evaluation = exporter.export_evaluation(model, batch[:1], **{name: each for name, each in shared.items() if name not in left_out})
    exporter.write_artifacts(step, evaluation, folder, provider=provider)
    return step, evaluation


def _eager(batches, ema=None, dynamo=False):
    model, loss = _model(dynamo), _Loss().train()
    averages = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD([*(p for p in model.parameters() if p.requires_grad), *loss.parameters()], lr=0.1)
    for x, target in batches:
        optimizer.zero_grad()
        loss(model(x), target).backward()
        optimizer.step()
        for average, p in zip(averages, model.parameters(), strict=True):
            if ema is not None and p.grad is not None:
                average.lerp_(p.detach(), 1 - ema)
    for average, p in zip(averages, model.parameters(), strict=True):
        if ema is not None:
            p.data = average
    return model


def _same_state(file, eager):
    """The file has all that the model's state_dict has, and nothing else; a strict load takes it."""
    state, expected = exporter.load(file).state_dict(), eager.state_dict()
    assert sorted(state) == sorted(expected)
    for key, value in expected.items():
        real = torch.view_as_real(value) if value.is_complex() else value
        assert state[key].dtype == real.dtype, key
        exact = {"rtol": 1e-4, "atol": 1e-5} if real.is_floating_point() else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(state[key], real, msg=lambda said, key=key: f"{key}: {said}", **exact)
    fitting = {key: torch.view_as_complex(value) if expected[key].is_complex() else value for key, value in state.items()}
    _Network().load_state_dict(fitting)


@both
@pytest.mark.parametrize("with_loss", [True, False], ids=["loss", ""])
def test_steps_of_a_trainer_in_memory(dynamo, with_loss, tmp_path):
    batches = _batches(4)
    step, evaluation = _written(tmp_path / "art", batches[0], dynamo=dynamo, with_loss=with_loss)
    trainer = exporter.Trainer(step, evaluation)
    for x, target in batches:
        trainer.step({"x": x, "target": target})
    eager = _eager(batches, dynamo=dynamo)
    _same_state(exporter.trained(tmp_path / "art", trainer.save()), eager)
    exporter.export(eager.eval(), batches[0][:1], dynamo=dynamo).save(tmp_path / "after.onnx")
    _same_state(tmp_path / "after.onnx", eager)


def test_steps_of_a_folder_and_the_command(tmp_path):
    batches = _batches(4)
    _written(tmp_path / "art", batches[0], dynamo=False)
    trainer = exporter.Trainer.load(tmp_path / "art")
    for x, target in batches:
        trainer.step({"x": x, "target": target})
    trainer.save(tmp_path / "after.state")
    output = tmp_path / "after.onnx"
    done = CliRunner().invoke(main, ["trained", str(tmp_path / "art"), str(tmp_path / "after.state"), "-o", str(output), "--json"])
    assert done.exit_code == 0, done.output
    eager = _eager(batches)
    _same_state(output, eager)
    assert json.loads(done.stdout)["parameters"] == len(list(eager.named_parameters(remove_duplicate=False)))
    x = batches[0][0]
    (scores,) = exporter.inference_session(output).run(["scores"], {"x": x.numpy()})
    np.testing.assert_allclose(scores, eager.eval()(x).detach().numpy(), rtol=1e-3, atol=1e-4)


def test_averages(tmp_path):
    batches = _batches(3)
    _written(tmp_path / "art", batches[0], dynamo=False, ema=0.5)
    trainer = exporter.Trainer.load(tmp_path / "art")
    for x, target in batches:
        trainer.step({"x": x, "target": target})
    _same_state(exporter.trained(tmp_path / "art", trainer.save(), ema=True), _eager(batches, 0.5))


def test_steps_of_node(tmp_path):
    batches = _batches(4)
    step, _ = _written(tmp_path / "art", batches[0], dynamo=False)
    write_batches(tmp_path, step, batches)
    in_node(tmp_path, tmp_path / "art", 0, 4, to="after.state")
    _same_state(exporter.trained(tmp_path / "art", tmp_path / "after.state"), _eager(batches))


def test_a_folder_for_one_provider_keeps_the_types(tmp_path):
    """Its counts of batches have 32 bits."""
    x, target = _batches(1)[0]
    _written(tmp_path / "art", (x, target), dynamo=False, provider="webgpu")
    trainer = exporter.Trainer.load(tmp_path / "art")
    trainer.step({"x": x, "target": target.int()})
    _same_state(exporter.trained(tmp_path / "art", trainer.save()), _eager([(x, target)]))


def test_it_costs_a_device_nothing(tmp_path, capfd):
    """No file that a program trains with has what no node reads, and onnxruntime warns of nothing."""
    _written(tmp_path / "art", _batches(1)[0], dynamo=False)
    manifest = json.loads((tmp_path / "art" / MANIFEST).read_text())
    assert manifest["files"]["unread"] == UNREAD
    for name in manifest["files"].values():
        session = onnxruntime.InferenceSession(tmp_path / "art" / name)
        given = [*session.get_inputs(), *session.get_outputs()]
        assert any("spare" in each.name for each in given) is (name == UNREAD), name
    assert "Removing initializer" not in capfd.readouterr().err
    outputs = {each.name for each in onnxruntime.InferenceSession(tmp_path / "art" / UNREAD).get_outputs()}
    assert outputs >= {"calls", "frozen.num_batches_tracked", "spare.weight", "twist_unread", "empty"}
    assert not outputs & {"fading_unread", "fading", "weights", "loss.unused", "body.weight"}


def test_where_all_is_read_there_is_no_such_file(tmp_path):
    batch = _batches(1)[0]
    options = {"loss": F.cross_entropy, "targets": batch[1:], "dynamo": False}
    model = nn.Linear(3, 4)
    (tmp_path / UNREAD).write_text("of another training")
    manifest = exporter.write_artifacts(
        exporter.export_training_step(model, batch[:1], **options), exporter.export_evaluation(model, batch[:1], **options), tmp_path
    )
    assert "unread" not in manifest["files"]
    state = exporter.load(exporter.trained(tmp_path, exporter.Trainer.load(tmp_path).save())).state_dict()
    assert sorted(state) == ["bias", "weight"]


def test_folders_of_before_open(tmp_path):
    """Their manifest lists no such file; counts of batches come from the state."""
    x, target = _batches(1)[0]
    _written(tmp_path, (x, target), dynamo=False, with_loss=False)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    del manifest["files"]["unread"]
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    os.remove(tmp_path / UNREAD)
    trainer = exporter.Trainer.load(tmp_path)
    trainer.step({"x": x, "target": target})
    state = exporter.load(exporter.trained(tmp_path, trainer.save())).state_dict()
    assert state["counting.num_batches_tracked"] == 1
    assert "calls" not in state


def test_what_is_listed_has_to_be_there(tmp_path):
    _written(tmp_path, _batches(1)[0], dynamo=False)
    saved = exporter.Trainer.load(tmp_path).save()
    (tmp_path / UNREAD).write_bytes((tmp_path / EVALUATION).read_bytes())
    with pytest.raises(FormatError, match=r"in the evaluation and in unread\.onnx"):
        exporter.trained(tmp_path, saved)
    os.remove(tmp_path / UNREAD)
    with pytest.raises(FormatError, match="No such file"):
        exporter.trained(tmp_path, saved)


def test_a_pipe_in_the_place_of_the_manifest_is_refused(tmp_path):
    """It waited for somebody to write."""
    _written(tmp_path, _batches(1)[0], dynamo=False)
    saved = exporter.Trainer.load(tmp_path).save()
    os.remove(tmp_path / MANIFEST)
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(FormatError, match="it is no plain file"):
        exporter.trained(tmp_path, saved)
    with pytest.raises(FormatError, match="it is no plain file"):
        exporter.Trainer.load(tmp_path)
