"""pythonop doctor FILE: what a file needs, and with --run the share of time that Python takes."""

from __future__ import annotations

import json

import onnx
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import exporter
from exporter.cli import main
from exporter.files.program import save_model

HERE = __name__


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Doubled(nn.Module):
    def forward(self, x):
        return Double.apply(x)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y * 2 if y.sum() > 0 else y - 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = Branch()

    def forward(self, x):
        return torch.linalg.solve(Double.apply(self.branch(x)) @ x.T + 9 * torch.eye(4), x).relu()


OPAQUE = ["missing", Branch]


def doctor(*arguments):
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


@pytest.fixture(scope="module")
def program():
    torch.manual_seed(0)
    return exporter.export(Net(), (torch.randn(4, 4),), opaque=OPAQUE, dynamo=False)


def test_what_a_file_needs(program, tmp_path):
    program.save(tmp_path / "model.onnx")
    found = json.loads(doctor(tmp_path / "model.onnx", "--json").stdout)
    assert {each["function"]: (each["kind"], each["reason"]) for each in found["python"]} == {
        f"{HERE}:Branch": ("module", "opaque= names it"),
        f"{HERE}:Double": ("Function", "it is called as an autograd Function"),
        "aten::linalg_solve.default": ("operator", "torch.onnx cannot translate it"),
    }
    assert set(found["allow"]) == {f"{HERE}:Branch", f"{HERE}:Double", "aten::linalg_solve.default"}
    assert not found["runs_anywhere"]
    assert found["gradients"] == 0
    module = exporter.load(tmp_path / "model.onnx", allow=found["allow"])  # no more is asked for
    assert module(torch.randn(4, 4)).shape == (4, 4)
    text = doctor(tmp_path / "model.onnx").stdout
    assert "3 of its" in text
    assert "onnx.reference alone" in " ".join(text.split())
    assert "exported with portable=True" in " ".join(text.split())


@pytest.mark.parametrize("text", ["[" * 5000 + "]" * 5000, '{"$callable": ["x"]}', "9" * 10_000], ids=["deep", "no name", "a number"])
@pytest.mark.parametrize("place", ["call", "outputs"])
def test_a_damaged_file_is_an_error_and_no_traceback(program, text, place, tmp_path):
    proto = onnx.ModelProto.FromString(program.model_proto.SerializeToString())
    if place == "call":
        node = next(node for node in proto.graph.node if node.op_type == "PythonOp")
        next(attribute for attribute in node.attribute if attribute.name == "call").s = text.encode()
    else:
        onnx.helper.set_model_props(proto, {"pythonop.outputs": text})
    onnx.save(proto, tmp_path / "model.onnx")
    done = doctor(tmp_path / "model.onnx")
    if place == "call":
        assert done.exit_code == 1 and "1 of 3 PythonOps cannot be read: " in done.stderr and "allow=[" not in done.stdout
        return
    assert done.exit_code == 2 and "the file is damaged" in " ".join(done.output.split()), done.output


def _cycle(proto):
    proto.graph.node[0].input[0] = proto.graph.output[0].name


def _opset(proto):
    proto.opset_import[0].version = 99


def _operator(proto):
    proto.graph.node[0].op_type = "NoSuchOp"


@pytest.mark.parametrize(
    ("spoil", "words"), [(_cycle, "nothing before it makes"), (_opset, "opset 99"), (_operator, "as onnx.checker says")]
)
def test_a_file_that_is_not_valid_runs_nowhere(spoil, words, tmp_path):
    """It needs no Python, and no runtime opens it."""
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (float[3] x) => (float[3] y) { a = Relu(x) y = Neg(a) }')
    onnx.save(model, tmp_path / "model.onnx")
    done = doctor(tmp_path / "model.onnx", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["runs_anywhere"] and not json.loads(done.stdout)["invalid"]
    spoil(model)
    onnx.save(model, tmp_path / "model.onnx")
    done = doctor(tmp_path / "model.onnx", "--json")
    assert done.exit_code == 1 and not json.loads(done.stdout)["runs_anywhere"]
    done = doctor(tmp_path / "model.onnx")
    assert "need not open it" in done.stdout and words in done.stderr


def test_a_file_with_tangents(tmp_path):
    program = exporter.export(nn.Sequential(nn.Linear(4, 4), Doubled()), (torch.randn(4, 4),), dynamo=False)
    save_model(exporter.build_tangent_graph(program), tmp_path / "tangent.onnx")
    assert json.loads(doctor(tmp_path / "tangent.onnx", "--json").stdout)["allow"] == [f"{HERE}:Double"]


def test_a_file_with_gradients(program, tmp_path):
    save_model(exporter.build_gradient_graph(program), tmp_path / "training.onnx")
    found = json.loads(doctor(tmp_path / "training.onnx", "--json").stdout)
    assert sum(each["calls"] for each in found["python"]) == found["gradients"] == 3


def test_a_plain_file(tmp_path):
    exporter.export(nn.Linear(3, 3), (torch.randn(2, 3),), dynamo=False).save(tmp_path / "model.onnx")
    result = doctor(tmp_path / "model.onnx")
    assert "any runtime that knows ONNX functions runs it" in result.stdout and "portable" not in result.stdout
    assert json.loads(doctor(tmp_path / "model.onnx", "--json").stdout)["runs_anywhere"]


def test_the_share_of_time(program, tmp_path):
    program.save(tmp_path / "model.onnx")
    entries = [f"--allow={name}" for name in (f"{HERE}:Branch", f"{HERE}:Double", "aten::linalg_solve")]
    found = json.loads(doctor(tmp_path / "model.onnx", "--run", "--json", *entries).stdout)["time"]
    assert 0 < found["share"] <= 1
    assert found["python"] == pytest.approx(sum(found["calls"].values()))
    assert {"Branch", "Double", "linalg_solve"} <= set(" ".join(found["calls"]).replace("+", " ").split())
    refused = doctor(tmp_path / "model.onnx", "--run")
    assert refused.exit_code == 2
    assert "not allowed" in refused.stderr


def test_options_without_a_file():
    assert doctor("--run").exit_code == 2
