"""What takes longer of ``fallback=True``: which way out is taken, and that nothing else changes."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from torch import nn

import exporter
from exporter.errors import ArgumentError, ExportError, PythonopWarning, RunError
from exporter.fallback import proof
from exporter.forward import hook as hooks
from tests.exporter.fallback.nets import Branch, Held, Net, Remembers, Solve, Unhashable, generators, named, state, taken


@dataclasses.dataclass
class Answer:
    y: torch.Tensor


torch.utils._pytree.register_dataclass(Answer)


def test_the_first_way_that_works(x):
    """Operators that are missing come before modules; a module is named once others are out of the way; two of them one after the other."""
    assert taken(Net(Solve()), x, dynamo=False).fallback == 'opaque="missing"'
    assert taken(Net(Branch()), x, dynamo=False).fallback == f"opaque=[{named(Branch)}]"
    assert taken(Net(Branch(), Remembers().eval()), x, dynamo=False).fallback == f"opaque=[{named(Branch)}, {named(Remembers)}]"
    assert taken(Net(Branch(), Solve()), x, dynamo=False).fallback == f'opaque=["missing", {named(Branch)}]'


def test_the_other_exporter_with_open_sizes(x):
    """dynamic_shapes are those of torch.export, the way is TorchScript's: the axis stays open."""
    model = Net(Unhashable())
    program = taken(model, x, dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    assert program.fallback == "dynamo=False"
    assert str(program.model.graph.inputs[0].shape[0]) == "rows"
    other = torch.randn(7, 4)
    torch.testing.assert_close(exporter.load(program)(other), model(other))


@pytest.mark.parametrize("training", [False, True])
def test_tries_change_nothing(x, training):
    model = Net(Remembers()).train(training)
    model.first.weight.grad = torch.ones(4, 4)
    exporter.export(model, (x,), dynamo=False)  # what an export itself changes (torch draws while it traces) is not of the tries
    torch.manual_seed(1)
    exporter.export(model, (x,), dynamo=False)
    plain = generators()
    before = state(model)
    torch.manual_seed(1)
    program = taken(model, x, dynamo=False)
    assert generators() == plain
    for (one, was), (two, now) in zip(before[0].values(), state(model)[0].values(), strict=True):
        assert one == two
        assert torch.equal(was, now)
    assert state(model)[1:] == before[1:]
    assert not any(node.function.endswith(":Remembers") is False for node in program.opaque)


def test_under_a_hook_the_file_is_that_of_the_way(x, tmp_path):
    with pytest.warns(PythonopWarning, match="fallback=True took"), exporter.hook(fallback=True) as handle:
        torch.onnx.export(Net(Branch()), (x,), tmp_path / "model.onnx", dynamo=False, input_names=["q"], dynamic_axes={"q": {0: "n"}})
    assert handle.program.fallback == f"opaque=[{named(Branch)}]"
    assert os.listdir(tmp_path) == ["model.onnx"]
    module = exporter.load(tmp_path / "model.onnx", allow=[f"{Branch.__module__}:Branch"])
    assert list(module._onnx.inputs) == ["q"]
    assert module(torch.randn(6, 4)).shape == (6, 4)


def test_installed(x):
    exporter.install(fallback=True)
    try:
        with pytest.warns(PythonopWarning, match="fallback=True took"):
            program = torch.onnx.export(Net(Unhashable()), (x,), dynamo=True, dynamic_shapes={"x": {0: "rows"}})
    finally:
        exporter.uninstall()
    assert isinstance(program, torch.onnx.ONNXProgram)
    torch.testing.assert_close(program(x)[0], Net(Unhashable())(x), rtol=9, atol=9)
    assert hooks._open_hooks == 0


def test_no_way_works(x, tmp_path):
    """A handle that no file can hold: what each way came to, a line each, and no file."""
    with pytest.raises(ExportError, match="fallback=True found no way out") as caught, exporter.hook(fallback=True):
        torch.onnx.export(Net(Held(), Unhashable()), (x,), tmp_path / "model.onnx", dynamo=True, dynamic_shapes={"x": {0: "rows"}})
    lines = str(caught.value).splitlines()
    assert len(lines) <= 10
    assert sum(": no: " in line for line in lines) >= 3
    assert "which no file can hold" in str(caught.value)
    assert isinstance(caught.value, torch.onnx.OnnxExporterError)
    assert not os.listdir(tmp_path)


def test_no_way_works_where_torch_made_a_file(x):
    """TorchScript gives a file that is right at the example alone: it stays, with its warning and one more."""
    with pytest.warns(PythonopWarning, match="fallback=True found no way out") as said:
        program = exporter.export(Net(Held()), (x,), fallback=True, dynamo=False)
    assert program.fallback == ""
    assert any(issubclass(each.category, torch.jit.TracerWarning) for each in said)


def test_a_file_that_differs_is_no_way_out(x, monkeypatch):
    monkeypatch.setattr(proof.Proof, "against", lambda self, program, strict=True: "output 0 differs")
    with pytest.raises(ExportError, match="output 0 differs"):
        exporter.export(Net(Solve()), (x,), fallback=True, dynamo=False)


def test_without_a_runtime_nothing_is_proven(x, monkeypatch):
    def absent(*args, **kwargs):
        raise RunError("onnxruntime is not installed")

    monkeypatch.setattr(proof, "load", absent)
    with pytest.raises(ExportError, match="onnxruntime is not installed"):
        exporter.export(Net(Solve()), (x,), fallback=True, dynamo=False)


def test_entries_of_opaque_are_still_checked(x):
    with pytest.raises(ArgumentError, match="means none"), pytest.warns(PythonopWarning, match="fallback=True took"):
        exporter.export(Net(Branch()), (x,), fallback=True, opaque=["nothing:Here"], dynamo=False)
    program = taken(Net(Branch(), Solve()), x, opaque=[Branch], dynamo=False)
    assert program.fallback == 'opaque="missing"'
    assert len(program.opaque) == 2


def test_a_training_step(x):
    model = Net(Branch())
    with pytest.warns(PythonopWarning, match="fallback=True took"):
        step = exporter.export_training_step(
            model, (x,), loss=nn.functional.mse_loss, targets=(torch.zeros(4, 4),), fallback=True, dynamo=False
        )
    assert step.fallback == f"opaque=[{named(Branch)}]"
    trainer = exporter.Trainer(step, allow=[f"{Branch.__module__}:Branch"])
    wanted = float(nn.functional.mse_loss(model(x), torch.zeros(4, 4)))
    assert abs(float(trainer.step({"x": x, "target": torch.zeros(4, 4)})) - wanted) < 1e-5


def test_verify_and_case(x):
    with pytest.warns(PythonopWarning, match="fallback=True took"):
        report = exporter.verify(exporter.Case(Net(Branch()), (x,), fallback=True), dynamo=False)
    assert report.ok
    assert report.program.fallback


def test_the_whole_model(x):
    assert taken(Branch(), x, dynamo=False).fallback == "opaque=[model]"


class Steps(nn.Module):
    """As many steps as the example has."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = torch.zeros_like(x[0])
        for each in x:
            h = torch.tanh(self.linear(h) + each)
        return h


@pytest.mark.parametrize("inside", [False, True])
def test_a_training_step_names_the_users_model(inside):
    """Not the module of ours around the model and its loss: nobody can name that."""
    model, x = nn.Sequential(Steps(), nn.Linear(4, 2)) if inside else Steps(), torch.randn(5, 3, 4)
    options = {"loss": lambda y: y.square().mean(), "dynamic_shapes": ({0: "time", 1: "batch"},)}
    with pytest.warns(PythonopWarning, match=r"fallback=True took opaque=\[model\]"):
        step = exporter.export_training_step(model, (x,), **options, fallback=True)
    assert [str(dim) for dim in step.model.graph.inputs[0].shape[:2]] == ["time", "batch"]


def test_a_model_with_a_module_of_any_name():
    model = Steps()
    model.given = nn.Linear(4, 4)
    assert taken(model, torch.randn(5, 3, 4), dynamic_shapes=({0: "time"},)).fallback == "opaque=[model]"


def test_one_tensor_given_twice(x):
    class Both(nn.Module):
        def forward(self, a, b):
            return a.sin() * b if a.sum() > -100 else b

    with pytest.warns(PythonopWarning, match="fallback=True took"):
        program = exporter.export(Both(), (x, x), fallback=True)
    torch.testing.assert_close(exporter.load(program, allow=[Both])(x, x + 1), x.sin() * (x + 1))


def test_dynamic_axes_are_the_other_exporters_too(x):
    """Also beside an argument that is no tensor."""

    class Named(nn.Module):
        def forward(self, x, times):
            return Answer(x * times)

    program = taken(Named(), x, kwargs={"times": 3}, dynamo=False, dynamic_shapes={"x": {0: "rows"}, "times": None})
    assert program.fallback == "dynamo=True"
    assert str(program.model.graph.inputs[0].shape[0]) == "rows"
