"""pythonop inspect and doctor: every name that a file asks for, whole, and every file that its values are in."""

from __future__ import annotations

import json
import os

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import exporter
from exporter.cli import main
from exporter.files.inspect import inspect_model
from exporter.files.named import names_in
from exporter.files.summary import summary_of
from symbolics.errors import FormatError
from symbolics.node.containers import Slot
from symbolics.node.linked import write_backward
from tests.exporter.files.test_inspect import LINK, model_with
from tests.symbolics.node import values as v
from tests.symbolics.node.node_models import call_of, model_of, node_of

HERE = __name__
HELPER = "tests.symbolics.node.values:helper"


def told(monkeypatch, *command):
    monkeypatch.setenv("COLUMNS", "400")
    done = CliRunner().invoke(main, [*map(str, command)])
    return done, done.stdout


def test_a_function_among_the_arguments_is_never_cut_away(monkeypatch, tmp_path):
    """It stands behind what fills the cell of its argument."""
    model = model_of(call_of(Slot(0), ["x" * 200, v.helper, v.Config(1, 2)], kwargs={"hook": v.helper}))
    model.metadata_props["pythonop.outputs"] = json.dumps({"$namedtuple": ["pkg.results:Pair", [{"$tensor": 0}]]})
    path = tmp_path / "m.onnx"
    ir.save(model, path)
    needed = ["pkg.mod:Fn", HELPER, "tests.symbolics.node.values:Config", "pkg.results:Pair"]
    done, text = told(monkeypatch, "inspect", path)
    assert done.exit_code == 0, done.output
    assert [line.split()[-1] for line in text.splitlines() if ":" in line.split()[-1] and "x0" not in line][:4] == needed
    _, calls = told(monkeypatch, "inspect", path, "--calls")
    assert f"names {HELPER}" in calls and "names tests.symbolics.node.values:Config" in calls
    found = json.loads(told(monkeypatch, "inspect", path, "--json")[1])
    assert found["allow"] == needed == names_in(ir.load(path))
    assert found["rows"][0]["names"] == needed[:3]
    assert json.loads(told(monkeypatch, "doctor", path, "--json")[1])["allow"] == needed
    assert repr(needed) in told(monkeypatch, "doctor", path)[1].replace("\n", "")


def test_many_long_names_are_all_listed(monkeypatch, tmp_path):
    names = [f"pkg.{'deep_' * 60}{index}:Fn" for index in range(50)]
    for command in ("inspect", "doctor"):
        model = model_of(call_of(Slot(0)))
        model.metadata_props["pythonop.outputs"] = json.dumps([{"$namedtuple": [name, []]} for name in names])
        ir.save(model, tmp_path / "m.onnx")
        text = told(monkeypatch, command, tmp_path / "m.onnx")[1]
        assert all(name in text.replace("\n", "") for name in names)


class Part(nn.Module):
    slope = 2.0

    def __init__(self):
        super().__init__()
        self.where, self.curve = "over/there", v.helper

    def forward(self, x):
        return x * self.slope


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.rate = Part(), 0.5

    def forward(self, x):
        return self.part(x) * self.rate


def test_the_settings_of_an_opaque_module(monkeypatch, tmp_path):
    path = tmp_path / "m.onnx"
    exporter.export(nn.Sequential(Whole()), (torch.ones(2),), opaque=[Whole], dynamo=False).save(path)
    allowed = [f"{HERE}:Whole", f"{HERE}:Part", HELPER]
    found = json.loads(told(monkeypatch, "inspect", path, "--json")[1])
    assert found["allow"] == found["rows"][0]["names"] == allowed
    settings = {"rate = 0.5", "part.slope = 2.0", "part.where = 'over/there'", f'part.curve = {{"$callable": "{HELPER}"}}'}
    assert set(found["rows"][0]["settings"]) == settings
    _, calls = told(monkeypatch, "inspect", path, "--calls")
    assert all(setting in calls for setting in settings) and f"names {HELPER}" in calls
    assert "part.slope" not in told(monkeypatch, "inspect", path)[1]


def test_the_values_that_functions_read(monkeypatch, tmp_path):
    model = model_of(call_of(Slot(0)))
    model.metadata_props["pythonop.values"] = json.dumps({"pkg.mod:Fn": {"pkg.mod:Fn.slope": 4.0, "torch:get_default_dtype()": "float64"}})
    ir.save(model, tmp_path / "m.onnx")
    text = told(monkeypatch, "inspect", tmp_path / "m.onnx")[1]
    assert "Reads" in text and "Fn.slope = 4.0, torch:get_default_dtype() = 'float64'" in text
    found = json.loads(told(monkeypatch, "inspect", tmp_path / "m.onnx", "--json")[1])
    assert found["values"] == {"pkg.mod:Fn": {"pkg.mod:Fn.slope": 4.0, "torch:get_default_dtype()": "float64"}}


def test_one_function_is_no_functions():
    facts = inspect_model(model_with(write_backward(LINK)))
    facts.portable = facts.portable[:1]
    assert dict(summary_of(facts).lines)["calls"].startswith("1 ONNX function with a backward of its own, ")
    facts.portable *= 2
    assert dict(summary_of(facts).lines)["calls"].startswith("2 ONNX functions with a backward of their own, ")


@pytest.mark.parametrize(
    "change",
    [
        lambda call: call | {"version": 2},
        lambda call: call | {"more": 1},
        lambda call: call | {"args": [{"$tensor": 7}]},
        lambda call: {},
    ],
    ids=["version", "unknown key", "slots", "empty"],
)
def test_a_damaged_call_is_one_to_doctor_too(change, monkeypatch, tmp_path):
    model = model_of(call_of(Slot(0)))
    call = change(json.loads(node_of(model).attributes["call"].as_string()))
    node_of(model).attributes.add(ir.Attr("call", ir.AttributeType.STRING, json.dumps(call)))
    ir.save(model, tmp_path / "m.onnx")
    for command in (["inspect"], ["doctor"], ["doctor", "--run"]):
        done, text = told(monkeypatch, command[0], tmp_path / "m.onnx", *command[1:])
        assert done.exit_code == 1, done.output
        assert "1 of 1 PythonOps cannot be read: " in done.stderr
        assert "allow=[" not in text
    done, text = told(monkeypatch, "doctor", tmp_path / "m.onnx", "--json")
    assert done.exit_code == 1 and json.loads(text)["allow"] == [] and not json.loads(text)["runs_anywhere"]


# ------------------------------------------------------------------------------------------------------------ data files


def with_data(path, location="m.data", **entries):
    """A model whose weight of two floats is in another file, by the words that it has for it."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }'
    )
    (weight,) = model.graph.initializer
    del weight.float_data[:]
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        weight.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    return path


def linked(folder):
    (folder / "outside").write_bytes(b"12345678")
    (folder / "m.data").symlink_to(folder / "outside")


CASES = {
    "missing": ({}, lambda folder: None, "which is not there: keep it beside the model"),
    "absolute": ({"location": "/etc/passwd"}, lambda folder: None, "below its own folder"),
    "above": ({"location": "../m.data"}, lambda folder: None, "below its own folder"),
    "a link": ({}, linked, "below its own folder"),
    "a pipe": ({}, lambda folder: os.mkfifo(folder / "m.data"), "no plain file"),
    "a folder": ({}, lambda folder: (folder / "m.data").mkdir(), "no plain file"),
    "cut off": ({}, lambda folder: (folder / "m.data").write_bytes(b"1234"), "the file was cut off"),
    "another length": ({"length": "4"}, lambda folder: (folder / "m.data").write_bytes(b"12345678"), "have 8"),
    "empty": ({"location": ""}, lambda folder: None, "below its own folder"),
}


@pytest.mark.parametrize("case", CASES)
def test_data_that_no_reader_would_take(case, monkeypatch, tmp_path):
    words, make, why = CASES[case]
    path = with_data(tmp_path / "m.onnx", **words)
    make(tmp_path)
    for command in ("inspect", "doctor"):
        done, _ = told(monkeypatch, command, path)
        assert done.exit_code == 1, done.output
        assert "1 of 1 data files cannot be read: " in done.stderr and why in done.stderr, done.stderr
        done, text = told(monkeypatch, command, path, "--json")
        assert done.exit_code == 1
        (found,) = json.loads(text)["data"]
        assert found["location"] == words.get("location", "m.data") and found["tensors"] == 1 and why in found["error"]
    said = set()
    for read in (exporter.load, exporter.inference_session, exporter.reference_evaluator):
        with pytest.raises(FormatError, match=why) as caught:
            read(path)
        said.add(str(caught.value))
    assert found["error"] in said


def test_data_that_is_there(monkeypatch, tmp_path):
    path = with_data(tmp_path / "m.onnx")
    (tmp_path / "m.data").write_bytes(np.ones(2, np.float32).tobytes())
    done, text = told(monkeypatch, "inspect", path)
    assert done.exit_code == 0 and "m.data: 8 bytes of 1 tensor" in text, text
    done, text = told(monkeypatch, "doctor", path)
    assert done.exit_code == 0 and "m.data" in text


def test_an_offset_that_is_no_number(monkeypatch, tmp_path):
    for offset in ("-8", "eight", "9" * 30):
        for command in ("inspect", "doctor"):
            done, _ = told(monkeypatch, command, with_data(tmp_path / "m.onnx", offset=offset))
            assert done.exit_code == 2 and "its offset and length are no numbers" in done.stderr, done.stderr


def test_a_tensor_of_another_size_than_it_says(monkeypatch, tmp_path):
    """As format.md says of inspect: the data of a tensor is what its type and dims say."""
    model = onnx.load_from_string(with_data(tmp_path / "m.onnx").read_bytes())
    (weight,) = model.graph.initializer
    weight.ClearField("external_data")
    weight.data_location, weight.raw_data = onnx.TensorProto.DEFAULT, b"1234"
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    for command in ("inspect", "doctor"):
        done, _ = told(monkeypatch, command, tmp_path / "m.onnx")
        assert done.exit_code == 2 and "its data are not 2 elements of type FLOAT" in done.stderr
