"""Functions whose backward writes to the model's state, or which have none."""

from __future__ import annotations

import pytest
import torch

import exporter
from symbolics.capture.undifferentiable import lacks_backward
from tests.exporter.forward.test_kept_state import Calls
from tests.symbolics.capture import keeping


class Remembers(torch.autograd.Function):
    """A memory of features, as models of re-identification have it: the backward moves it."""

    @staticmethod
    def forward(ctx, x, features):
        ctx.features = features
        ctx.save_for_backward(x)
        return x @ features.T

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        found = grad @ ctx.features
        ctx.features.mul_(0.5).add_(x.sum(0) * 0.5)
        return found, None


class Forward(torch.autograd.Function):
    """As code for TensorRT has it: a forward, a symbolic, another result while it is exported, and no backward."""

    @staticmethod
    def forward(ctx, x, weight):
        if torch.onnx.is_in_onnx_export():
            return torch.zeros_like(x)
        return torch.nn.functional.layer_norm(x, (4,), weight)

    @staticmethod
    def symbolic(graph, x, weight):
        return graph.op("own::LayerNorm", x, weight)


class Thrifty(torch.autograd.Function):
    """Its gradients take the memory of those that come in."""

    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, g, h):
        return g.mul_(2).add_(h.mul_(3))


class Scratch(torch.autograd.Function):
    """Its gradient takes the memory of what forward gave out."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.y = y.detach()
        return y

    @staticmethod
    def backward(ctx, g):
        return ctx.y.mul_(g)


class Last(torch.nn.Module):
    """What the Function returns is what the model returns: nothing stands between its backward and the cotangents."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = torch.nn.Linear(4, 4), function

    def forward(self, x):
        return self.function.apply(self.linear(x))


class Memory(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("features", torch.randn(3, 4))

    def forward(self, x):
        return Remembers.apply(self.linear(x), self.features)


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.weight = torch.nn.Parameter(torch.rand(4))

    def forward(self, x):
        return self.linear(Forward.apply(x, self.weight))


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("function", [Thrifty, Scratch])
def test_a_backward_in_the_memory_of_others(function, dynamo):
    """Each side has its own: neither the cotangents nor eager's outputs are other ones for the file."""
    report = exporter.verify(Last(function), (torch.randn(8, 4),), dynamo=dynamo, bisect=True)
    assert report.ok, report


def test_finite_differences_of_a_backward_in_the_memory_of_others():
    program = exporter.export(Last(Thrifty).double(), (torch.randn(2, 4, dtype=torch.float64),))
    assert exporter.check_gradients(program, order=1, allow=[f"{__name__}:*"]) < 1e-6


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_backward_that_writes(dynamo):
    report = exporter.verify(Memory(), (torch.randn(2, 4),), dynamo=dynamo)
    assert not report.ok and {row.name.removeprefix("buffer ") for row in report.rows if not row.ok} == {"features"}
    (note,) = [note for note in report.notes if note.title == "Written by a backward"]
    assert "writes to features, in eager" in note.text


@pytest.mark.parametrize("dynamo", [True, False])
def test_without_a_backward_outputs_are_compared(dynamo):
    report = exporter.verify(Normed(), (torch.randn(2, 4),), dynamo=dynamo)
    assert report.ok
    (note,) = [note for note in report.notes if note.title == "Outputs alone"]
    assert "no gradients" in note.text
    assert {row.kind for row in report.rows if row.eager_error is not None} <= {"output", "second input"}


def test_a_wrong_output_is_found_without_a_backward(tmp_path):
    model = Normed()
    exporter.export(model, (torch.randn(2, 4),)).save(tmp_path / "model.onnx")
    with torch.no_grad():
        model.weight.add_(1)
    report = exporter.verify(model, (torch.randn(2, 4),), file=tmp_path / "model.onnx")
    assert not report.ok


def test_what_torch_says_of_a_function_without_a_backward():
    with pytest.raises(NotImplementedError) as error:
        Forward.apply(torch.ones(2, 4, requires_grad=True), torch.ones(4)).sum().backward()
    assert lacks_backward(error.value) and not lacks_backward(NotImplementedError("derivative for aten::x is not implemented"))


@pytest.mark.filterwarnings("ignore:.* changes ")
def test_a_function_that_keeps_state(monkeypatch):
    monkeypatch.setattr(keeping.InBackward, "scale", 1.0)
    monkeypatch.setattr(keeping.Average, "running", torch.zeros(()))
    report = exporter.verify(Calls(keeping.InBackward), (torch.randn(2, 3),))
    (note,) = [note for note in report.notes if note.title == "Kept between calls"]
    assert not report.ok and "InBackward keeps state: its backward changes InBackward.scale." in note.text
    message = r"differ: it keeps state between calls \(Average.running\)\..*\n  state: pass it"
    with pytest.raises(exporter.PythonopError, match=message):
        exporter.verify(Calls(keeping.Average), (torch.randn(2, 3),))
