"""Numbers and texts that a Function reads of its class, its module and namespaces: who opens a file where they are others is told."""

from __future__ import annotations

import argparse
import json
import types

import onnx_ir as ir
import pytest
import torch

import exporter
from symbolics.errors import FormatError
from symbolics.node.metadata import read_values
from symbolics.node.names import VALUES_KEY
from symbolics.node.outside_values import values_read
from tests.exporter.runtime import settings_of_values as settings
from tests.support import Calls

HERE = __name__
WIDTH = 0.5
NAME = "atan"
HAS_KERNEL = False
LONG = "x" * 1000
HUGE = 1 << 60
COUNT = 0
OPTIONS = argparse.Namespace(slope=2.0)
SPACE = types.SimpleNamespace(cut=1)
UNREAD = 3.0
LEVELS = torch.tensor([[-1.0, 0.5]])
MEANS = [0.25, "rgb"]
SEEN = []
MOVED = torch.zeros(2)
WIDE = torch.zeros(17)


class Config:
    gain = 1.5
    unread = 7


class Base(torch.autograd.Function):
    last = {"of": 0}
    alpha = 1.0
    calls = 0


class Spike(Base):
    beta = 2
    table = (1.0, 2.0)

    @staticmethod
    def forward(ctx, x):
        global COUNT
        COUNT += 1
        Spike.calls += 1
        SEEN.append(1)
        MOVED[0].add_(LEVELS[0, 0])
        Spike.last["of"] = len(MEANS) + len(WIDE)
        ctx.save_for_backward(x)
        if HAS_KERNEL or len(LONG) > HUGE:
            return x
        return torch.where(x > SPACE.cut * 0.0, x * Config.gain, x * settings.FACTOR)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return _surrogate(x, Spike.alpha) * grad * COUNT / COUNT


def _surrogate(x, alpha):
    scale = Spike.beta if NAME == "atan" else 1
    return alpha * scale / (1 + (alpha * WIDTH * x) ** 2) * OPTIONS.slope * Spike.table[0]


READ = {
    f"{HERE}:Spike.alpha": 1.0,
    f"{HERE}:Spike.beta": 2,
    f"{HERE}:WIDTH": 0.5,
    f"{HERE}:NAME": "atan",
    f"{HERE}:OPTIONS.slope": 2.0,
    f"{HERE}:SPACE.cut": 1,
    f"{HERE}:Config.gain": 1.5,
    f"{HERE}:settings.FACTOR": 0.25,
    f"{HERE}:Spike.table": (1.0, 2.0),
    f"{HERE}:LEVELS": (-1.0, 0.5),
    f"{HERE}:MEANS": (0.25, "rgb"),
}


def test_what_is_read():
    """Neither what the Function counts in, nor what tells what a machine has, nor what is long, nor what it does not read."""
    assert values_read(Spike) == READ


def _model():
    return Calls(Spike.apply)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("values") / "model.onnx"
    exporter.export(_model(), (torch.randn(3),)).save(path)
    return path


WAYS = {
    "load": exporter.load,
    "inference_session": exporter.inference_session,
    "reference_evaluator": exporter.reference_evaluator,
}

PLACES = {
    "class": (Spike, "beta", 3, "Spike.beta is 3 and was 2"),
    "shadowed": (Spike, "alpha", 2.0, "Spike.alpha is 2.0 and was 1.0"),
    "base": (Base, "alpha", 3.0, "Spike.alpha is 3.0 and was 1.0"),
    "module": (None, "WIDTH", 0.75, "WIDTH is 0.75 and was 0.5"),
    "text": (None, "NAME", "sigmoid", "NAME is 'sigmoid' and was 'atan'"),
    "namespace": (OPTIONS, "slope", 1, "OPTIONS.slope is 1 and was 2.0"),
    "another class": (Config, "gain", 1.0, "Config.gain is 1.0 and was 1.5"),
    "tuple": (Spike, "table", (1.0, 3.0), r"Spike.table is \(1.0, 3.0\) and was \(1.0, 2.0\)"),
    "list": (None, "MEANS", [0.5], r"MEANS is \(0.5,\) and was \(0.25, 'rgb'\)"),
    "tensor": (None, "LEVELS", torch.tensor([[-1.0, 0.0]]), r"LEVELS is \(-1.0, 0.0\) and was \(-1.0, 0.5\)"),
    "another module": (settings, "FACTOR", 0.5, "settings.FACTOR is 0.5 and was 0.25"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_who_opens_the_file_is_told(way, place, path, monkeypatch, recwarn):
    holder, name, value, text = PLACES[place]
    WAYS[way](path, allow=[f"{HERE}:Spike"], strict=True)
    assert not [each for each in recwarn if issubclass(each.category, exporter.PythonopWarning)]
    if holder is None:
        monkeypatch.setitem(globals(), name, value)
    else:
        monkeypatch.setattr(holder, name, value, raising=False)
    with pytest.warns(exporter.PythonopWarning, match=f"{text} when the file was exported") as said:
        WAYS[way](path, allow=[f"{HERE}:Spike"])
    assert len(said) == 1 and len(str(said[0].message)) < 500
    assert "and Functions in the file read it: set it before" in str(said[0].message) and "other commands: --register" in str(
        said[0].message
    )
    with pytest.raises(exporter.RunError, match=text):
        WAYS[way](path, allow=[f"{HERE}:Spike"], strict=True)


@pytest.mark.parametrize(("name", "value"), [("HAS_KERNEL", 0), ("COUNT", 10), ("UNREAD", 4.0)])
def test_what_counts_for_nothing(name, value, path, monkeypatch, recwarn):
    monkeypatch.setitem(globals(), name, value)
    exporter.load(path, allow=[f"{HERE}:Spike"], strict=True)
    assert not [each for each in recwarn if issubclass(each.category, exporter.PythonopWarning)]


def test_a_trainer_and_a_gradient_graph(monkeypatch):
    step = exporter.export_training_step(
        torch.nn.Sequential(torch.nn.Linear(3, 3), _model()), (torch.randn(2, 3),), loss=torch.nn.functional.mse_loss,
        targets=(torch.randn(2, 3),), optimizer="sgd",
    )  # fmt: skip
    gradient = exporter.build_gradient_graph(exporter.export(_model(), (torch.randn(3),)))
    monkeypatch.setattr(Spike, "beta", 5)
    with pytest.warns(exporter.PythonopWarning, match="Spike.beta is 5 and was 2"):
        exporter.Trainer(step, allow=[f"{HERE}:Spike"])
    with pytest.warns(exporter.PythonopWarning, match="Spike.beta is 5 and was 2"):
        exporter.inference_session(gradient, allow=[f"{HERE}:Spike"])


def test_verify_says_so_of_the_fresh_process(monkeypatch):
    monkeypatch.setattr(Spike, "beta", 5)
    report = exporter.verify(torch.nn.Sequential(torch.nn.Linear(3, 3), _model()), (torch.randn(2, 3),))
    (note,) = [note for note in report.notes if note.title == "Changed since the export"]
    assert not report.ok and f"{HERE}:Spike.beta is 2 and was 5" in note.text


def test_verify_says_so_of_this_process(path, monkeypatch):
    """Of a file that was there, the fresh process has the values of the export, and eager here has others."""
    monkeypatch.setattr(Spike, "beta", 5)
    report = exporter.verify(_model(), (torch.randn(3, requires_grad=True),), file=path)
    (note,) = [note for note in report.notes if note.title == "Changed since the export"]
    assert not report.ok and "In this process" in note.text and f"{HERE}:Spike.beta is 5 and was 2" in note.text


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"a": 1}',
        '{"a": {"b": null}}',
        '{"a": {"b": [[1]]}}',
        '{"a": {"b": [null]}}',
        '{"a": {"b": {}}}',
        '{"a": {"b": 1e999}}',
        json.dumps({"a": {"b": "x" * 1000}}),
    ],
)
def test_damaged_values(text, path):
    with pytest.raises(FormatError, match="pythonop.values"):
        read_values({VALUES_KEY: text})
    model = ir.load(path)
    model.metadata_props[VALUES_KEY] = text
    with pytest.raises(FormatError, match="pythonop.values"):
        exporter.load(model, allow=[f"{HERE}:Spike"])


def test_a_file_that_names_other_values_reads_nothing():
    """A file can ask for no value that the Function does not read."""
    program = exporter.export(_model(), (torch.randn(3),))
    program.model.metadata_props[VALUES_KEY] = json.dumps(
        {f"{HERE}:Spike": {f"{HERE}:UNREAD": 0.0, "os:environ": "x"}, "os:getcwd": {"x": 1}}
    )
    exporter.load(program, allow=[f"{HERE}:Spike"], strict=True)


class Ramped(torch.autograd.Function):
    """Makes tensors of torch's default type: with float32 here, a model of float64 has numbers of float32."""

    @staticmethod
    def forward(ctx, x):
        return x * torch.linspace(0.1, 1, x.shape[-1])

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.linspace(0.1, 1, grad.shape[-1])


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_the_default_type_of_new_tensors(float64, recwarn):
    report = exporter.verify(torch.nn.Sequential(torch.nn.Linear(3, 3), Calls(Ramped.apply)), (torch.randn(2, 3),))
    (note,) = [note for note in report.notes if note.title == "Changed since the export"]
    assert not report.ok and "torch:get_default_dtype() is 'float32' and was 'float64'" in note.text
    program, plain = (exporter.export(Calls(function.apply), (torch.randn(3),)) for function in (Ramped, Plain))
    allow = [f"{HERE}:*"]
    exporter.load(program, allow=allow, strict=True)
    torch.set_default_dtype(torch.float32)
    exporter.load(plain, allow=allow, strict=True)
    with pytest.raises(exporter.RunError, match="get_default_dtype"):
        exporter.load(program, allow=allow, strict=True)
    assert VALUES_KEY not in exporter.export(Calls(Ramped.apply), (torch.randn(3),)).model.metadata_props


def test_setup_sets_what_a_fresh_process_needs(float64):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), Calls(Ramped.apply))
    assert exporter.verify(model, (torch.randn(2, 3),), setup="tests.exporter.runtime.settings_of_values:float64").ok


class Scaled(torch.autograd.Function):
    scale = 2.0

    @staticmethod
    def forward(ctx, x):
        return x * Scaled.scale

    @staticmethod
    def backward(ctx, grad):
        return grad * Scaled.scale


class Sets(torch.nn.Module):
    """Sets a value of a class for each of its calls, and back in the end."""

    def __init__(self, *scales):
        super().__init__()
        self.scales = scales

    def forward(self, x):
        before = Scaled.scale
        for scale in self.scales:
            Scaled.scale = scale
            x = Scaled.apply(x)
        Scaled.scale = before
        return x


def test_a_value_that_changes_between_calls_is_warned_of(dynamo):
    with pytest.warns(
        exporter.PythonopWarning, match="it reads .*:Scaled.scale, which is 5.0 in this call and was 3.0 in an earlier one"
    ) as said:
        exporter.export(Sets(3.0, 5.0, 5.0), (torch.randn(3),), dynamo=dynamo)
    assert len(said) == 1 and "pass it as an argument" in str(said[0].message)


def stepped(x):
    return x * settings.FACTOR


def test_nor_has_a_function_that_is_one_node_another_value_for_each_call(dynamo, monkeypatch):
    monkeypatch.setattr(settings, "FACTOR", settings.FACTOR)

    class Steps(torch.nn.Module):
        def forward(self, x):
            for settings.FACTOR in (0.5, 0.75):
                x = stepped(x)
            return x

    with pytest.warns(
        exporter.PythonopWarning, match="stepped in module <root>: it reads .*FACTOR, which is 0.75 in this call and was 0.5"
    ):
        exporter.export(Steps(), (torch.randn(3),), opaque=[f"{HERE}:stepped"], dynamo=dynamo)


def test_the_file_says_what_the_call_read(dynamo):
    program = exporter.export(Sets(3.0), (torch.randn(3),), dynamo=dynamo)
    with pytest.warns(exporter.PythonopWarning, match="Scaled.scale is 2.0 and was 3.0 when the file was exported"):
        exporter.load(program, allow=[f"{HERE}:Scaled"])


def test_no_function_of_the_file_stands_for_a_value_of_the_call_alone(dynamo):
    with pytest.warns(exporter.PythonopWarning, match="stays a PythonOp.*Scaled.scale, which was 3.0 in this call and is 2.0 after it"):
        program = exporter.export(Sets(3.0), (torch.randn(3),), portable=True, dynamo=dynamo)
    assert [call.kind for call in program.portable] == ["PythonOp"]
    (call,) = exporter.export(Sets(2.0), (torch.randn(3),), portable=True, dynamo=dynamo).portable
    assert call.kind == "function"
