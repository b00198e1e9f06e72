"""What a trainer keeps and takes: schedules of torch, averages, losses in eval mode, and a state that goes on in another process."""

from __future__ import annotations

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import exporter
from symbolics.errors import ArgumentError, ExportError, FormatError
from tests.exporter.training.loop import batches_of, eager, network, run, step_of
from tests.processes import python

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def _fed(trainer, batches, schedules=()):
    names = (*trainer.layout.inputs, *trainer.layout.targets)
    losses = []
    for batch in batches:
        losses.append(trainer.step(dict(zip(names, batch, strict=True))))
        for schedule in schedules:
            schedule.step()
    return losses


def _groups(model):
    return torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}], lr=0.01)


SCHEDULES = {
    "a callable": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=6),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=[0.2, 0.1], total_steps=9, cycle_momentum=False),
    "warm-up": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.StepLR(optimizer, 2)], milestones=[3]
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_are_torchs(schedule):
    model, batches = network(torch.float32), batches_of(8, torch.float32)
    optimizer = _groups(model)
    trainer = exporter.Trainer(step_of(model, batches[0], optimizer=_groups(model), dynamo=False))
    losses = _fed(trainer, batches, [SCHEDULES[schedule](trainer.optimizer)])
    beside = SCHEDULES[schedule](optimizer)
    expected = []
    for batch in batches:
        expected += eager(model, F.cross_entropy, optimizer, [batch])
        beside.step()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == pytest.approx([group["lr"] for group in optimizer.param_groups])
    assert trainer.steps == 8


def test_settings_of_groups_hold_until_they_are_changed():
    batches = batches_of(3, torch.float32)
    model = network(torch.float32)
    trainer = exporter.Trainer(step_of(model, batches[0], optimizer=_groups(model), dynamo=False))
    first, second = trainer.optimizer.param_groups
    assert (first["weight_decay"], second["lr"]) == pytest.approx((0.01, 0.01))
    before = trainer.state_dict()
    first["lr"] = 0.0
    _fed(trainer, batches)
    after = trainer.state_dict()
    assert [key for key in before if torch.equal(before[key], after[key])] == ["0.weight", "0.bias"]


class _Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.norm, self.last = nn.Linear(4, 16), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.norm(self.drop(torch.tanh(self.first(x)))))


OPTIONS = {"optimizer": "nadam", "accumulate": 2, "ema": 0.9, "clip_norm": 0.5, "precision": "float16"}
RESUME = """
import exporter, torch
trainer = exporter.Trainer.load("step.onnx")
schedule = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.9)
trainer.restore("half.state")
schedule.load_state_dict(torch.load("schedule.pt"))
losses = []
for x, y in torch.load("batches.pt"):
    losses.append(trainer.step({"x": x, "target": y}))
    schedule.step()
print(losses)
trainer.save("whole.state")
"""


def test_a_fresh_process_goes_on_to_the_same_bits(tmp_path):
    batches = batches_of(10, torch.float32)
    step = step_of(_Dropping().train(), batches[0], dynamo=False, **OPTIONS)
    step.save(tmp_path / "step.onnx")
    trainer = exporter.Trainer(step)
    schedule = lr_scheduler.ExponentialLR(trainer.optimizer, 0.9)
    _fed(trainer, batches[:5], [schedule])
    assert trainer.save(tmp_path / "half.state") == (tmp_path / "half.state").read_bytes()
    torch.save(schedule.state_dict(), tmp_path / "schedule.pt")
    torch.save(batches[5:], tmp_path / "batches.pt")
    losses = _fed(trainer, batches[5:], [schedule])
    told = python("-W", "ignore", "-c", RESUME, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout) == losses
    assert (tmp_path / "whole.state").read_bytes() == trainer.save()
    assert trainer.steps == 5


def test_a_seed_of_ones_own():
    """Given with one batch, it is where masks come from, then and from there on."""
    batches = batches_of(4, torch.float32)
    step = step_of(_Dropping().train(), batches[0], dynamo=False)
    given, set_before = exporter.Trainer(step), dataclasses.replace(step, initial={**step.initial, "seed": np.array(1234)})
    losses = [given.step({"x": x, "target": y, **({"seed": 1234} if at == 0 else {})}) for at, (x, y) in enumerate(batches)]
    assert losses == _fed(exporter.Trainer(set_before), batches)
    assert losses != _fed(exporter.Trainer(step), batches)
    with pytest.raises(ArgumentError, match="the input 'seed' takes a tensor of torch.int64"):
        given.step({"x": batches[0][0], "target": batches[0][1], "seed": 0.5})


def test_a_rate_that_is_no_number_is_refused():
    """It would destroy the parameters in one step; torch's optimizers refuse it as well."""
    batches = batches_of(1, torch.float32)
    trainer = exporter.Trainer(step_of(network(torch.float32), batches[0], dynamo=False))
    names = (*trainer.layout.inputs, *trainer.layout.targets)
    batch, before = dict(zip(names, batches[0], strict=True)), trainer.save()
    for rate in (float("nan"), float("inf"), torch.tensor(float("nan"))):
        with pytest.raises(ArgumentError, match="learning_rate is (nan|inf): give a finite number"):
            trainer.step({**batch, "learning_rate": rate})
    group = trainer.optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], float("nan")
    with pytest.raises(ArgumentError, match="learning_rate is nan: give a finite number"):
        trainer.step(batch)
    group["lr"] = rate
    assert trainer.save() == before
    trainer.step(batch)


def test_a_file_of_state_that_is_none(tmp_path):
    trainer = exporter.Trainer(step_of(network(torch.float32), batches_of(1, torch.float32)[0], dynamo=False))
    with pytest.raises(FormatError, match="cannot be read"):
        trainer.restore(tmp_path / "none.state")
    (tmp_path / "other").write_bytes(b"[]\n")
    with pytest.raises(ArgumentError, match="another model or optimizer"):
        trainer.restore(tmp_path / "other")
    with pytest.raises(ExportError, match="nothing was written"):
        trainer.save(tmp_path / "no" / "folder")
    with pytest.raises(ArgumentError, match="not int"):
        trainer.restore(3)


def _trained(dynamo, **more):
    torch.manual_seed(0)
    model, batches = _Dropping().train(), batches_of(6, torch.float32)
    shared = {"loss": F.cross_entropy, "targets": batches[0][1:], "dynamo": dynamo, "dynamic_shapes": {"x": {0: "batch"}}, **more}
    step = exporter.export_training_step(model, batches[0][:1], optimizer="sgd", hyperparameters={"lr": 0.3}, ema=0.5, **shared)
    return model, batches, step, exporter.export_evaluation(model, batches[0][:1], **shared)


def test_the_loss_in_eval_mode(tmp_path, dynamo):
    model, batches, step, evaluation = _trained(dynamo, output_names=["logits"])
    manifest = exporter.write_artifacts(step, evaluation, tmp_path)
    assert manifest["files"]["eval_loss"] == "eval_loss.onnx"
    assert [each["name"] for each in manifest["eval"]["inputs"] + manifest["eval"]["outputs"]] == ["x", "logits"]
    x, y = torch.randn(3, 4), torch.tensor([0, 2, 1])
    for trainer in (exporter.Trainer(step, evaluation), exporter.Trainer.load(tmp_path)):
        _fed(trainer, batches)
        assert trainer.outputs["logits"].shape == (5, 3)
        for ema in (False, True):
            twin = copy.deepcopy(model).eval()
            twin.load_state_dict(trainer.state_dict(ema=ema), strict=False)
            found = trainer.evaluate({"x": x, "target": y}, ema=ema)
            assert list(found) == ["loss", "logits"]
            torch.testing.assert_close(found["logits"], twin(x).detach(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(found["loss"], F.cross_entropy(twin(x), y).detach(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(trainer.evaluate({"x": x}, ema=ema), {"logits": found["logits"]}, rtol=0, atol=0)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(FormatError, match="no manifest"):
        exporter.Trainer.load(tmp_path)


def test_a_stale_loss_is_not_taken(tmp_path):
    model, batches, step, _ = _trained(False)
    (tmp_path / "eval_loss.onnx").write_text("of another training")
    exporter.write_artifacts(step, exporter.export_evaluation(model, batches[0][:1], dynamo=False), tmp_path)
    trainer = exporter.Trainer.load(tmp_path)
    with pytest.raises(ArgumentError, match="it has no loss: give export_evaluation the step's loss="):
        trainer.evaluate({"x": batches[0][0], "target": batches[0][1]})


def test_without_an_average():
    trainer = exporter.Trainer(step_of(network(torch.float32), batches_of(1, torch.float32)[0], dynamo=False))
    with pytest.raises(ArgumentError, match="no average of param.0.weight: give export_training_step ema="):
        trainer.state_dict(ema=True)


class TestOutputNames:
    def test_the_model_gives_them_beside_the_loss(self, dynamo):
        model, batches = network(), batches_of(2)
        step = step_of(model, batches[0], output_names=["logits"], dynamo=dynamo)
        session = exporter.inference_session(step.model)
        assert [value.name for value in session.get_outputs()][:2] == ["loss", "logits"]
        feeds = {**step.initial, **dict(zip(("input", "target"), (t.numpy() for t in batches[0]), strict=True))}
        logits = session.run(["logits"], {value.name: feeds[value.name] for value in session.get_inputs()})[0]
        np.testing.assert_allclose(logits, model(batches[0][0]).detach(), rtol=1e-9)
        np.testing.assert_allclose(run(step, batches)[0], eager(model, F.cross_entropy, torch.optim.AdamW(model.parameters()), batches))

    @pytest.mark.parametrize("names", ["logits", ["loss"], ["param.0.weight"], ["a.next"], ["a", "b"]])
    def test_names_that_cannot_be(self, names):
        with pytest.raises(ArgumentError, match="output_names"):
            step_of(network(), batches_of(1)[0], output_names=names, dynamo=False)
