from __future__ import annotations

import warnings

import pytest
import torch

import exporter
from exporter import PythonopWarning
from tests.symbolics.capture import keeping


class Calls(torch.nn.Module):
    def __init__(self, function, times=1):
        super().__init__()
        self.linear, self.function, self.times = torch.nn.Linear(3, 3), function, times

    def forward(self, x):
        x = self.linear(x)
        for _ in range(self.times):
            x = self.function.apply(x)
        return x


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(keeping.InBackward, "scale", 1.0)
    monkeypatch.setattr(keeping.Average, "running", torch.zeros(()))
    monkeypatch.setattr(keeping.Breaks, "last", None)
    monkeypatch.setattr(keeping, "cache", {})
    monkeypatch.setattr(keeping, "table", {})


SAYS = {
    keeping.InBackward: "InBackward in module <root>: its backward changes InBackward.scale, which the next call may read",
    keeping.Average: "Average in module <root>: its forward changes Average.running, which it may read in the next call",
    keeping.Counted: "Counted in module <root>: its forward changes tests.symbolics.capture.keeping:cache, which it may",
}


def _said(*args, **options) -> tuple[exporter.Program, list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program = exporter.export(*args, **options)
    return program, [str(each.message) for each in said if each.category is PythonopWarning]


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("function", SAYS, ids=lambda function: function.__name__)
def test_warned_once(function, dynamo):
    _, said = _said(Calls(function, 2), (torch.randn(2, 3),), dynamo=dynamo)
    assert [SAYS[function] in each for each in said] == [True] and "the file holds none of it" in said[0]


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("function", SAYS, ids=lambda function: function.__name__)
def test_a_portable_file_keeps_the_call(function, dynamo):
    program, said = _said(Calls(function), (torch.randn(2, 3),), portable=True, dynamo=dynamo)
    (call,) = program.portable
    assert call.kind == "PythonOp" and f"changes {SAYS[function].split(' changes ')[1].split(',')[0]}" in call.reason
    assert sum(SAYS[function] in each for each in said) == 1


def test_the_file_does_what_eager_does():
    x, model = torch.randn(2, 3), Calls(keeping.InBackward)
    with pytest.warns(PythonopWarning, match="backward changes"):
        module = exporter.load(exporter.export(model, (x,), portable=True), allow=["tests.*"])

    def gradients(run):
        keeping.InBackward.scale = 1.0
        found = []
        for _ in range(3):
            given = x.clone().requires_grad_()
            run(given).sum().backward()
            found.append(given.grad)
        return torch.stack(found)

    torch.testing.assert_close(gradients(module), gradients(model))


def test_inlined():
    _, said = _said(Calls(keeping.Counted), (torch.randn(2, 3),), inline=["tests.*"])
    assert any(
        "its forward changes tests.symbolics.capture.keeping:cache" in each and "inlined, the file has the value" in each for each in said
    )


@pytest.mark.parametrize("portable", [False, True])
def test_a_memo_is_no_state(portable):
    program, said = _said(Calls(keeping.RememberedNumber), (torch.randn(2, 3),), portable=portable)
    assert not any("changes" in each for each in said)
    assert not portable or not program.opaque


def test_a_memo_holds_no_tensor_of_the_capture():
    exporter.export(Calls(keeping.Remembered), (torch.randn(2, 3),), eager_check=False)
    assert all(type(each) is torch.Tensor for each in keeping.table.values())


@pytest.mark.filterwarnings("ignore:.*its forward changes")
@pytest.mark.parametrize("inline", [(), ("tests.*",)])
@pytest.mark.parametrize("dynamo", [True, False])
def test_the_model_runs_after_its_export(dynamo, inline):
    x, model = torch.randn(2, 3), Calls(keeping.Average)
    exporter.export(model, (x,), dynamo=dynamo, inline=inline)
    assert type(keeping.Average.running) is torch.Tensor
    assert model(x).isfinite().all()


def test_nor_does_a_failed_export_leave_anything():
    with pytest.raises(exporter.ExportError, match="its forward raised ValueError: no"):
        exporter.export(Calls(keeping.Breaks), (torch.randn(2, 3),), eager_check=False)
    assert keeping.Breaks.last is None or type(keeping.Breaks.last) is torch.Tensor
