"""Models of float32 that compute in 16 bits inside: what is allowed there, and what is still found."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import exporter
from exporter.verification.compare import compare
from exporter.verification.notes import choices_of, note_on_constants, note_on_half, notes_on
from exporter.verification.rows import Row

HALF, BFLOAT = torch.float16, torch.bfloat16


class Net(nn.Module):
    """Convolutions with norms under autocast; a bias in front of a norm has a gradient of roundings alone."""

    def __init__(self, blocks, act=nn.SiLU):
        super().__init__()
        body = [x for _ in range(blocks) for x in (nn.BatchNorm2d(8), act(), nn.Conv2d(8, 8, 3, padding=1))]
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *body)

    def forward(self, x):
        with torch.autocast("cpu", HALF):
            return self.body(x)


class Casts(nn.Module):
    """A product of numbers that forward rounds itself, and one in float32, which no rounding reaches."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.one, self.two, self.apart = kind, nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(16, 4)

    def forward(self, x):
        inside = self.one(x).to(self.kind).float().tanh()
        if self.kind is HALF:  # onnxruntime has no product in bfloat16
            inside = (inside.half() @ self.two.weight.half().t()).float()
        else:
            inside = self.two(inside).to(self.kind).float()
        return inside, self.apart(x)


@pytest.mark.parametrize("act", [nn.SiLU, nn.ReLU])
@pytest.mark.parametrize("training", [False, True])
def test_autocast(training, act):
    torch.manual_seed(0)
    report = exporter.verify(Net(2, act).train(training), (torch.randn(2, 3, 16, 16),), steps=1)
    assert report.ok, str(report)
    assert {row.half for row in report.rows} <= {"float16", ""} and any(row.half for row in report.rows)


@pytest.mark.parametrize("kind", [HALF, BFLOAT])
def test_a_cast_in_forward(kind):
    torch.manual_seed(0)
    report = exporter.verify(Casts(kind), (torch.randn(8, 16),), steps=1)
    assert report.ok, str(report)
    rows = {row.name: row for row in report.rows}
    assert rows["output 0"].half and rows["one.weight"].half and rows["one.weight"].eager_error > 1e-5
    assert not rows["output 1"].half and rows["output 1"].tolerance < 5e-5 and rows["apart.weight"].tolerance < 5e-5
    name = str(kind).removeprefix("torch.")
    (note,) = [note for note in report.notes if note.title == "Half precision inside"]
    assert f"results in {name}" in note.text and f"{4 * torch.finfo(kind).eps:.1e}" in note.text and note.text in str(report.as_json())
    assert "Half precision inside" in "\n".join(report._shown(20)[1])


class Off(torch.autograd.Function):
    """Right here, and off by a factor in the fresh process."""

    @staticmethod
    def forward(ctx, x, forward_by, backward_by):
        ctx.by = backward_by
        return x * (forward_by if _is_fresh() else 1.0)

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.by if _is_fresh() else 1.0), None, None


def _is_fresh():
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == "exporter.verification.worker"


class Wrong(nn.Module):
    def __init__(self, kind, *by):
        super().__init__()
        self.kind, self.by, self.one, self.two = kind, by, nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        if self.kind is HALF:
            with torch.autocast("cpu", HALF):
                return self.two(Off.apply(self.one(x), *self.by).tanh())
        return self.two(Off.apply(self.one(x).to(self.kind).float(), *self.by).to(self.kind).float())


@pytest.mark.parametrize("kind", [HALF, BFLOAT])
@pytest.mark.parametrize("by", [(1.0, 1.05), (1.0, 2.0), (1.0, 0.0), (1.05, 1.0), (0.5, 1.0)])
def test_a_wrong_number_is_found(kind, by):
    torch.manual_seed(0)
    model, x = Wrong(kind, *by), torch.randn(8, 16)
    report = exporter.verify(model, (x,), steps=1, bisect=by == (1.0, 2.0))
    assert not report.ok and any(row.half for row in report.rows if not row.ok), str(report)


@pytest.mark.parametrize("kind", [HALF, BFLOAT])
def test_the_same_without_it_is_right(kind):
    torch.manual_seed(0)
    report = exporter.verify(Wrong(kind, 1.0, 1.0), (torch.randn(8, 16),), steps=1)
    assert report.ok, str(report)


def _row(kind, own, error, half, *, count=100, near=0.0):
    """Eager is ``own`` off float64 and the file ``error``, or ``near`` off eager, in one element each."""
    exact = torch.ones(count, dtype=torch.float64)

    def results(off, dtype=kind, index=0):
        moved = exact.clone()
        moved[index] += off
        return SimpleNamespace(outputs=[moved.to(dtype)], gradients={}, buffers={})

    (row,) = compare(
        results(own), results(0.0, torch.float64), results(own + near if near else error, index=0 if near else 1), {}, half=half
    )
    return row


@pytest.mark.parametrize(
    ("half", "own", "error", "ok"),
    [
        (None, 9e-4, 2e-3, True),  # without half types: ten times eager's own error up to 1e-3, then eager to 1e-5
        (None, 1.1e-3, 2e-3, False),
        (HALF, 1.1e-3, 2e-3, True),
        (HALF, 1.1e-3, 1.2e-2, False),
        (HALF, 5e-5, 3e-3, True),
        (HALF, 5e-5, 5e-3, False),
        (HALF, 1e-7, 1e-4, False),  # eager does not compute this in float16
        (HALF, 1.9e-2, 5e-2, False),
        (BFLOAT, 8e-3, 3e-2, True),
        (BFLOAT, 8e-3, 5e-2, False),
        (BFLOAT, 1e-7, 1e-4, False),
        (HALF, 0.3, 1e-3, True),  # eager is on the other side of a threshold, the file is not
        (HALF, 0.3, 5e-2, False),
    ],
)
def test_what_is_allowed(half, own, error, ok):
    row = _row(torch.float32, own, error, half)
    assert (row.ok, row.half) == (ok, "" if half is None or own < 1e-6 else str(half).removeprefix("torch.")), row


def test_the_file_may_be_on_eagers_side_of_a_threshold():
    assert _row(torch.float32, 0.3, 0.0, HALF, near=1e-2).ok and not _row(torch.float32, 0.3, 0.0, HALF, near=-5e-2).ok
    assert _row(HALF, 0.3, 1e-3, HALF).ok and not _row(torch.float32, 0.3, 1e-3, None).ok


def test_a_slope_that_jumps_is_no_constant_of_the_example():
    row = Row("parameter gradient a", "second input", (3,), "float32", 0.3, 7e-4, 4e-3, "float64", False, half="float16")
    model = exporter.export(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (torch.randn(1, 2),)).model
    assert choices_of(model, gates=True) == {"Relu": 1} and not choices_of(model)
    assert not list(note_on_constants([row])) and list(note_on_constants([Row(**{**vars(row), "half": ""})]))
    assert [note.title for note in notes_on([row], choices_of(model, gates=True))] == ["Ties and thresholds"]
    assert "2e-02 from the nearer" in next(note_on_half([Row(**{**vars(row), "eager_error": 0.3})])).text


class Norms(nn.Module):
    """Of float64, with a norm in float32, as many transformers have."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 8, dtype=torch.float64)

    def forward(self, x):
        y = self.one(x).float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).double(), self.one(x)


def test_float32_inside_float64():
    torch.manual_seed(0)
    report = exporter.verify(Norms(), (torch.randn(5, 6, dtype=torch.float64),), steps=1)
    assert report.ok, str(report)
    one, two, *_ = report.rows
    assert (one.half, two.half) == ("float32", "")
