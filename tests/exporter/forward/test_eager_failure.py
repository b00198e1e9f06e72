"""A model that fails in eager mode on its own example is an error with eager's words and the user's line, by whatever door it comes."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import exporter
from symbolics.errors import ExportError

LOSS = nn.functional.mse_loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(5, 3))

    def forward(self, x):
        return self.encoder(x)


def doors(dynamo, tmp_path):
    """name -> a call with a model and its arguments."""

    def hooked(model, args):
        with exporter.hook():
            torch.onnx.export(model, args, tmp_path / "m.onnx", dynamo=dynamo)

    def step(model, args):
        exporter.export_training_step(model, args, loss=LOSS, targets=(torch.randn(8, 3),), dynamo=dynamo)

    return {
        "export": lambda model, args: exporter.export(model, args, dynamo=dynamo),
        "hook": hooked,
        "step": step,
        "verify": lambda model, args: exporter.verify(model, args, dynamo=dynamo),
    }


@pytest.mark.parametrize("door", ["export", "hook", "step", "verify"])
def test_by_every_door(door, dynamo, tmp_path):
    model, args = Net(), (torch.randn(8, 4),)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(8x4 and 5x3\)") as eager:
        model(*args)
    with pytest.raises(ExportError) as caught:
        doors(dynamo, tmp_path)[door](model, args)
    told = str(caught.value)
    assert f"RuntimeError: {eager.value}" in told
    assert "at test_eager_failure.py:" in told and "in forward: return self.encoder(x); module encoder.2 (Linear)" in told
    assert "way out" in told and len(told.splitlines()) == 3
    assert isinstance(caught.value.whole.cause, RuntimeError) and not list(tmp_path.iterdir())


def test_another_type_than_the_weights(dynamo):
    """torch.onnx.export made a file of it, which no runtime opens."""
    with pytest.raises(ExportError, match=r"(?s)must have the same dtype.*module <root> \(Linear\)"):
        exporter.export(nn.Linear(4, 3), (torch.randn(8, 4, dtype=torch.float64),), dynamo=dynamo)


def test_the_loss_is_part_of_it(dynamo):
    with pytest.raises(ExportError, match="The size of tensor a"):
        exporter.export_training_step(nn.Linear(4, 3), (torch.randn(8, 4),), loss=LOSS, targets=(torch.randn(8, 7),), dynamo=dynamo)


def test_an_argument_that_is_missing(dynamo):
    with pytest.raises(ExportError, match="missing 1 required positional argument"):
        exporter.export(nn.Linear(4, 3), (), dynamo=dynamo)


def test_gradients_are_as_where_it_is_called(dynamo):
    """A model for inference alone runs without gradients, and is exported there."""

    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(self.weight.numpy().size)

    model, args = Reads(4, 3), (torch.randn(8, 4),)
    with pytest.raises(ExportError, match=r"(?s)fails in eager mode.*Can't call numpy\(\) on Tensor that requires grad.*, in forward: "):
        exporter.export(model, args, dynamo=dynamo)
    with torch.no_grad():
        if dynamo:
            program = exporter.export(model, args)
            found = exporter.inference_session(program.model_proto).run(None, {program.model.graph.inputs[0].name: args[0].numpy()})
            torch.testing.assert_close(torch.from_numpy(found[0]), model(*args))
        else:  # a trace needs gradients
            with pytest.raises(ExportError, match=r"cannot capture the model.*numpy\(\)"):
                exporter.export(model, args, dynamo=False)


def test_tensors_without_data_are_not_run_again():
    """Of them eager may know less than an exporter: what fails there is no fault of the model."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from exporter.forward.eager_graph import EagerGraph

    class Reads(nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    with FakeTensorMode():
        graph = EagerGraph.of(Reads(), (torch.randn(3),), {})
    assert graph.failed


class Full(Exception):
    """Is made of more than a text."""

    def __init__(self, code, *, what):
        super().__init__(f"{what} {code}")
        self.code = code


class Sealed(Exception):
    """Nobody may derive from it."""

    def __init_subclass__(cls, **kwargs):
        raise TypeError("sealed")


class Raising(nn.Linear):
    def __init__(self, error, *, traced=False):
        super().__init__(3, 3)
        self.error, self.traced = error, traced

    def forward(self, x):
        if not self.traced or torch.jit.is_tracing() or torch.compiler.is_exporting():
            raise self.error
        return super().forward(x)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize(
    "error", [Full(7, what="f"), KeyError("k"), OSError(2, "no"), torch.OutOfMemoryError("oom")], ids=lambda e: type(e).__name__
)
def test_the_error_is_of_the_users_class_too(error, traced, dynamo):
    with pytest.raises(ExportError) as caught:
        exporter.export(Raising(error, traced=traced), (torch.randn(2, 3),), dynamo=dynamo, eager_check=not traced)
    mine, again = caught.value, pickle.loads(pickle.dumps(caught.value))
    for one in (mine, again):
        assert isinstance(one, type(error)) and isinstance(one, ExportError) and getattr(one, "code", None) == getattr(error, "code", None)
    assert str(again) == str(mine) and f"{type(error).__name__}: {error}" in str(mine)
    assert mine.__context__ is error or traced


@pytest.mark.parametrize("error", [Sealed("s"), StopIteration("s"), SyntaxError("s"), ExceptionGroup("s", [ValueError()])])
def test_where_it_cannot_be_it_is_ours(error):
    with pytest.raises(ExportError, match=f"{type(error).__name__}: s") as caught:
        exporter.export(Raising(error), (torch.randn(2, 3),))
    assert type(caught.value) is ExportError


class ForExporters(nn.Linear):
    def forward(self, x):
        if not (torch.onnx.is_in_onnx_export() or torch.compiler.is_exporting()):
            raise RuntimeError("it needs another machine")
        return super().forward(x)


def test_a_model_that_only_an_exporter_can_run(dynamo):
    with pytest.warns(exporter.PythonopWarning, match="could not be compared.*RuntimeError"):
        program = exporter.export(ForExporters(3, 3), (torch.randn(2, 3),), dynamo=dynamo)
    assert len(program.model.graph) == 1
