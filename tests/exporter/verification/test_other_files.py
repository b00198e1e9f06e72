"""verify of a file that was there already and is the file of another model; and a model that fails in its second step."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import exporter
from exporter.cli import main
from tests.exporter.module import functions as F
from tests.zoo.functions import Cube, Double


class Net(nn.Module):
    def __init__(self, size=4, twice=False):
        super().__init__()
        self.linear, self.twice = nn.Linear(3, size), twice

    def forward(self, x):
        y = self.linear(x)
        return (y, y * 2) if self.twice else y


X = (torch.randn(2, 3),)


def wide():
    return Net(7), X


def note(report, title):
    return next(each.text for each in report.notes if each.title == title)


@pytest.mark.parametrize(
    ("model", "other", "what"),
    [
        pytest.param(Net(), Net(7), "Output 0 (scores) is [2, 4] in the file, [2, 7] in the model", id="shape"),
        pytest.param(Net(), Net(twice=True), "The file has 1 output (scores), the model 2", id="fewer"),
        pytest.param(Net(twice=True), Net(), "The file has 2 outputs (scores, ", id="more"),
    ],
)
def test_outputs_of_another_model(tmp_path, model, other, what):
    """A difference that the report names, and no error of a backward for which the cotangents do not fit."""
    path = tmp_path / "net.onnx"
    exporter.export(model, X, output_names=["scores"], dynamic_shapes={"x": {0: "batch"}}).save(path)
    report = exporter.verify(other, X, file=path, steps=1, bisect=True, dynamic_shapes={"x": {0: "batch"}})
    assert not report.ok and report.first_departure is None
    text = note(report, "Other outputs")
    assert text.startswith(f"{what}") and "gradients were not compared" in text and "Way out: export this model again" in text
    assert any(row.kind == "output" and not row.ok for row in report.rows)
    assert not any("gradient" in row.kind for row in report.rows), "of which there is nothing to compare with"
    assert {row.kind for row in report.rows if not row.ok} >= {"second input", "second size"}


def test_rows_have_the_names_of_a_file_s_outputs(tmp_path):
    path, model = tmp_path / "net.onnx", Net(twice=True)
    exporter.export(model, X, output_names=["scores", "logits"]).save(path)
    report = exporter.verify(model, X, file=path, steps=1)
    assert report.ok and {row.name: bool(row.node) for row in report.rows if row.kind == "output"} == {
        "output 0 (scores)": True,
        "output 1 (logits)": True,
    }


def test_the_command_says_that_they_differ(tmp_path):
    path = tmp_path / "net.onnx"
    exporter.export(Net(), X).save(path)
    done = CliRunner().invoke(main, ["verify", str(path), f"{__name__}:wide", "--json"])
    assert done.exit_code == 1, done.output
    assert {each["title"] for each in json.loads(done.stdout)["notes"]} == {"Other outputs", "Other weights"}


def test_weights_of_other_shapes_are_not_to_be_loaded(tmp_path):
    path = tmp_path / "net.onnx"
    exporter.export(Net(), X).save(path)
    text = note(exporter.verify(Net(7), X, file=path, steps=1), "Other weights")
    assert "linear.weight: in the file it is float32 of shape [4, 3]" in text and "load_state_dict" not in text
    with torch.no_grad():
        (other := Net()).linear.bias.add_(1)
    assert "load_state_dict" in note(exporter.verify(other, X, file=path, steps=1), "Other weights")


def test_a_file_in_integers(tmp_path):
    """Its weights are none of the model's: another command compares it."""
    weight = numpy_helper.from_array(torch.ones(3, 4, dtype=torch.int8).numpy(), "linear.weight.integers")
    scale = numpy_helper.from_array(torch.tensor(0.5).numpy(), "scale")
    program = exporter.export(Net(), X)
    proto = program.model_proto
    graph = proto.graph
    (gemm,) = (node for node in graph.node if node.op_type == "Gemm")
    kept = [each for each in graph.initializer if each.name != "linear.weight"]
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend([*kept, weight, scale])
    graph.node.extend(
        [
            helper.make_node("DequantizeLinear", [weight.name, "scale"], ["w"]),
            helper.make_node("MatMul", [gemm.input[0], "w"], ["product"]),
            helper.make_node("Add", ["product", "linear.bias"], [graph.output[0].name]),
        ]
    )
    assert weight.data_type == TensorProto.INT8
    state = next(each for each in proto.metadata_props if each.key == "pythonop.state")
    state.value = json.dumps({name: entry for name, entry in json.loads(state.value).items() if name != "linear.weight"})
    path = tmp_path / "integers.onnx"
    path.write_bytes(proto.SerializeToString())
    report = exporter.verify(Net(), X, file=path, steps=1)
    text = note(report, "A file in integers")
    assert f"pythonop verify --quantized {path} TARGET" in text
    assert not any(each.title == "Other weights" for each in report.notes)


class Keeps(nn.Module):
    """It keeps what hangs on the graph of the step before."""

    def __init__(self, make):
        super().__init__()
        self.linear, self.make = nn.Linear(3, 3), make
        self.register_buffer("running", torch.ones(()))

    def forward(self, x):
        y, self.running = self.make(self.linear(x), self.running)
        return y


@pytest.mark.parametrize(
    ("make", "behind"),
    [(F.RunningUndetached.apply, "Function RunningUndetached gave it, at functions.py:"), (F.running, "its grad_fn is ")],
)
def test_eager_fails_in_its_second_step(make, behind):
    with pytest.raises(exporter.ExportError) as caught:
        exporter.verify(Keeps(make).train(), X, steps=1)
    first, *middle, last = str(caught.value).splitlines()
    assert first.startswith("eager PyTorch fails in the second step of the model, not the file: RuntimeError: Trying to backward through")
    assert "buffer 'running' keeps the graph of the step before" in middle[-1] and behind in middle[-1]
    assert "way out: detach it (self.running = self.running.detach() behind the step)" in last and "mark_non_differentiable" in last


def test_a_portable_file_of_older_code(tmp_path):
    """It has the functions of its export and no fingerprint of them: the report says so, where something differs and there alone."""

    class Scaled(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.linear, self.function = nn.Linear(3, 4), function

        def forward(self, x):
            return self.function.apply(self.linear(x))

    model, path = Scaled(Cube), tmp_path / "net.onnx"
    exporter.export(model, X, portable=True).save(path)
    title = "The code of the export"
    report = exporter.verify(model, X, file=path, steps=1)
    assert report.ok and all(each.title != title for each in report.notes)
    model.function = Double
    report = exporter.verify(model, X, file=path, steps=1)
    assert not report.ok and "Cube" in note(report, title) and "export again" in note(report, title)


def test_an_assertion_about_a_kept_file_names_what_leads_to_the_function(tmp_path):
    path = tmp_path / "kept.onnx"
    exporter.export(Net(), X).save(path)
    with pytest.raises(AssertionError) as told:
        exporter.testing.assert_roundtrip(Net(), X, file=path, steps=1)
    assert "bisect=True names the first node that departs" in str(told.value)
    assert f"pythonop diff {path} TODAY" in str(told.value)
    with pytest.raises(AssertionError) as told:
        exporter.testing.assert_roundtrip(Net(), X, file=path, steps=1, bisect=True)
    assert "bisect=True" not in str(told.value) and "pythonop diff" in str(told.value)
