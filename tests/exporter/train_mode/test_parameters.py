"""Trained parameters that a forward changes (weights that are clipped or kept short): gradients and updates are of the new value, as in eager."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exporter
from exporter import errors
from exporter.training.step import export_training_step
from symbolics.node.metadata import changes_of
from tests.exporter.training.loop import run


class Clipped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.3, 0.3)
        return super().forward(x)


class ClippedByData(nn.Linear):
    def forward(self, x):
        self.weight.data.clamp_(-0.3, 0.3)
        return super().forward(x)


class Short(nn.Linear):
    """As the convolutions of EEGNet."""

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


class OneRow(nn.Linear):
    def forward(self, x):
        self.weight.data[0] = self.weight.data[0] / self.weight.data[0].norm()
        self.bias.detach()[1:].mul_(0.5)
        return super().forward(x)


class Replaced(nn.Linear):
    """It does not read what it writes over."""

    def forward(self, x):
        self.weight.data.copy_(x.detach().mean(0))
        return super().forward(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4, max_norm=0.5)
        self.parts = nn.Sequential(*(kind(4, 4) for kind in (Clipped, ClippedByData, Short, OneRow, Replaced)))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        self.frozen.data.mul_(0.9)
        return self.parts(x + self.table(torch.tensor([0, 2, 2, 4, 1, 0]))).sin() * self.frozen


def _batches(count=4):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)) for _ in range(count)]


def _model():
    torch.manual_seed(0)
    return Model().train()


def _assert_alike(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(torch.as_tensor(found[name]), value.detach(), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_loaded_file_trains(dynamo):
    model, batches = _model(), _batches()
    before = copy.deepcopy(model.state_dict())
    program = exporter.export(model, batches[0][:1], dynamo=dynamo)
    _assert_alike(model.state_dict(), before)
    changed = {name for name in before if name.endswith("weight") or name in ("frozen", "parts.3.bias")}
    assert set(changes_of(program.model).carried) == changed
    module = exporter.load(program).train()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, module)]
    for x, y in batches:
        for each, optimizer in zip((model, module), optimizers, strict=True):
            optimizer.zero_grad()
            F.mse_loss(each(x), y).backward()
        _assert_alike(
            {n: p.grad for n, p in module.named_parameters()}, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        )
        _assert_alike(module.state_dict(), model.state_dict())
        for optimizer in optimizers:
            optimizer.step()
    _assert_alike(module.state_dict(), model.state_dict())


@pytest.mark.parametrize(("dynamo", "accumulate"), [(True, 1), (False, 2)])
def test_a_training_step_starts_from_what_was_written(dynamo, accumulate):
    model, batches = _model(), _batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    step = export_training_step(
        model, batches[0][:1], loss=F.mse_loss, targets=batches[0][1:], optimizer=optimizer, dynamo=dynamo, accumulate=accumulate, ema=0.9
    )
    losses, state = run(step, batches)
    for number, (x, y) in enumerate(batches, 1):
        loss = F.mse_loss(model(x), y)
        assert losses[number - 1] == pytest.approx(loss.item(), rel=1e-5)
        (loss / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    _assert_alike({key: state[name] for key, name in (*step.layout.parameters.items(), *step.layout.buffers.items())}, model.state_dict())


@pytest.mark.usefixtures("quick_verify")
def test_verify_compares_what_was_written():
    report = exporter.verify(_model(), _batches()[0][:1], dynamo=False)
    assert report.ok, report
    assert {row.name for row in report.rows if row.kind == "buffer"} >= {"frozen", "parts.0.weight", "table.weight"}


class SetOnce(nn.Linear):
    """Its first call sets the weight from data; it knows by an attribute, or by a buffer, that it has been."""

    def __init__(self, buffer):
        super().__init__(4, 4)
        self.done = nn.Buffer(torch.tensor(0)) if buffer else 0

    def forward(self, x):
        if self.done == 0:
            self.weight.data.copy_(x.detach()[:4])
            self.done += 1
        return super().forward(x)


class ByNumPy(nn.Linear):
    def forward(self, x):
        self.weight.detach().numpy()[...] *= 0.5
        return super().forward(x)


class ReadBefore(nn.Linear):
    """Eager's backward of the first call reads what was written after it."""

    def forward(self, x):
        y = super().forward(x)
        self.weight.data.mul_(0.9)
        return super().forward(y)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: SetOnce(False), "'weight' in its first call alone.*\n.*call the model once"),
        (lambda: SetOnce(True), "'weight' in its first call alone.*\n.*call the model once"),
        (lambda: ByNumPy(4, 4), "'weight', a parameter that is trained, where the exporter cannot look.*\n.*way out"),
        (lambda: ReadBefore(4, 4), "mul_, called in module <root>.*after autograd may have kept it.*before anything reads it"),
    ],
)
def test_what_no_file_is_right_about_is_refused(model, said, dynamo):
    with pytest.raises(errors.ExportError, match=said):
        exporter.export(model().train(), (torch.randn(6, 4),), dynamo=dynamo)


def test_a_parameter_that_was_set_is_one():
    model, x = SetOnce(False).train(), torch.randn(6, 4)
    model(x)
    torch.testing.assert_close(exporter.load(exporter.export(model, (x,), dynamo=False))(2 * x), model(2 * x))


class Moved(nn.Linear):
    """A parameter is given what it has, after it was read: as experts do that are moved to where they are already."""

    def __init__(self, how):
        super().__init__(4, 4)
        self.how = how

    def forward(self, x):
        y = super().forward(x)
        if self.how == "module.to":
            self.to("cpu")
        else:
            self.weight.data = self.weight.detach() if self.how == "detach" else self.weight.data.view(4, 4)
        return super().forward(y)


@pytest.mark.parametrize("how", ["module.to", "data", "detach"])
def test_a_parameter_that_is_given_what_it_has_is_not_changed(how, dynamo):
    model, x = Moved(how), torch.randn(2, 4)
    module = exporter.load(exporter.export(model, (x,), dynamo=dynamo))
    for side in (model, module):
        side(x).sin().sum().backward()
    for (name, one), (_, two) in zip(model.named_parameters(), module.named_parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, msg=name)
        assert torch.equal(one, two)
