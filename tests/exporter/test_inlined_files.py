"""A portable file whose functions somebody inlined: all that needs no gradients takes it, and what needs them says which file has them."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx.inliner
import onnxruntime
import pytest
import torch
from click.testing import CliRunner

import exporter
from exporter.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")

_LOST = "functions that have a backward of their own and has 0"


class Rounded(torch.autograd.Function):
    """Eight bits, straight through."""

    @staticmethod
    def forward(ctx, x, scale):
        return torch.clamp(torch.round(x / scale), -127, 127) * scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 8)
        self.register_buffer("scale", torch.tensor(0.05))
        self.register_buffer("weight_scale", self.linear.weight.detach().abs().max() / 127)

    def forward(self, x):
        weight = Rounded.apply(self.linear.weight, self.weight_scale)
        return torch.nn.functional.linear(Rounded.apply(x, self.scale), weight, self.linear.bias)


def make():
    torch.manual_seed(0)
    return Model().eval(), (torch.randn(4, 16),)


def other():
    """Another weight, and so another model."""
    model, args = make()
    with torch.no_grad():
        model.linear.bias += 1.0
    return model, args


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inlined")
    exporter.export(*make(), portable=True, dynamic_shapes={"x": {0: "batch"}}).save(folder / "kept.onnx")
    onnx.save(onnx.inliner.inline_local_functions(onnx.load(folder / "kept.onnx")), folder / "plain.onnx")
    exporter.to_qonnx(folder / "kept.onnx").save(folder / "qonnx.onnx")
    exporter.quantize(folder / "plain.onnx").save(folder / "integers.onnx")
    return folder


X = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
TARGET = f"{__name__}:make"

#: Commands -> the exit status, and what the last of their lines says where it is not 0.
COMMANDS = {
    "inspect {plain}": (0, ""),
    "doctor {plain}": (0, ""),
    "doctor {plain} --json": (0, ""),
    "run {plain}": (0, ""),
    "run {plain} --reference": (0, ""),
    "profile {plain}": (0, ""),
    "draw {plain} -o {out}.html": (0, ""),
    "diff {plain} {plain}": (0, ""),
    "diff {kept} {plain}": (1, ""),
    "quantize {plain} -o {out}.onnx": (0, ""),
    "quantize {plain} -o {out}.onnx --compare 2": (0, ""),
    "quantize {plain} -o {out}.onnx --weights int4 --group 16": (0, ""),
    "quantize {plain} -o {out}.onnx --to qonnx": (0, ""),
    "verify --quantized {integers} {plain}": (0, ""),
    "verify --quantized {integers} {kept}": (0, ""),
    "verify {kept} {target}": (0, ""),
    "gradient {plain} -o {out}.onnx": (2, _LOST),
    "tangent {plain} -o {out}.onnx": (2, _LOST),
    "gradient {integers} -o {out}.onnx": (2, _LOST),
    "run {integers}": (0, ""),
}


@pytest.mark.parametrize("line", COMMANDS)
def test_commands(files, tmp_path, line):
    places = {name: files / f"{name}.onnx" for name in ("plain", "kept", "integers")}
    done = CliRunner().invoke(main, line.format(**places, out=tmp_path / "out", target=TARGET).split())
    code, told = COMMANDS[line]
    assert done.exit_code == code and told in done.output, done.output


def _loaded(name, grad):
    def call(folder):
        module = exporter.load(folder / name)
        with torch.set_grad_enabled(grad):
            return module(torch.from_numpy(X))

    return call


#: Functions -> whether they need gradients.
FUNCTIONS = {
    "session": (lambda folder: exporter.inference_session(folder / "plain.onnx").run(None, {"x": X}), False),
    "reference": (lambda folder: exporter.reference_evaluator(folder / "plain.onnx").run(None, {"x": X}), False),
    "load, inference": (_loaded("plain.onnx", False), False),
    "load, frozen": (lambda folder: exporter.load(folder / "plain.onnx").requires_grad_(False)(torch.from_numpy(X)), False),
    "load, training": (_loaded("plain.onnx", True), True),
    "quantize": (lambda folder: exporter.quantize(folder / "plain.onnx").compare({"x": X}), False),
    "verify_quantized": (lambda folder: exporter.verify_quantized(folder / "integers.onnx", folder / "plain.onnx", {"x": X}), False),
    "to_qonnx, from_qonnx": (lambda folder: exporter.from_qonnx(exporter.to_qonnx(folder / "plain.onnx")), False),
    "gradients": (lambda folder: exporter.build_gradient_graph(folder / "plain.onnx"), True),
    "tangents": (lambda folder: exporter.build_tangent_graph(folder / "plain.onnx"), True),
    "check_gradients": (lambda folder: exporter.check_gradients(folder / "plain.onnx"), True),
    "gradients of the integers": (lambda folder: exporter.build_gradient_graph(folder / "integers.onnx"), True),
    "gradients of its QONNX": (lambda folder: exporter.build_gradient_graph(exporter.to_qonnx(folder / "plain.onnx")), True),
    "integers, inference": (_loaded("integers.onnx", False), False),
    "integers, training": (_loaded("integers.onnx", True), True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(files, name):
    call, needs_gradients = FUNCTIONS[name]
    if not needs_gradients:
        assert call(files) is not None
        return
    with pytest.raises(exporter.FormatError, match=_LOST) as told:
        call(files)
    assert "under torch.no_grad()" in str(told.value)


def test_its_integers_are_those_of_the_file_as_it_was(files):
    kept = exporter.quantize(files / "kept.onnx")
    sessions = [
        onnxruntime.InferenceSession(each, providers=["CPUExecutionProvider"])
        for each in (kept.model_proto.SerializeToString(), (files / "integers.onnx").read_bytes())
    ]
    one, two = (session.run(None, {"x": X})[0] for session in sessions)
    assert np.array_equal(one, two)
    exporter.build_gradient_graph(kept)  # nobody else inlined anything there


def test_lost_marks_are_no_matter_to_integers_either(dynamo):
    """A stop-gradient mark that somebody inlined: its count stays, and a gradient is refused."""

    class Stopped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(32, 32)

        def forward(self, x):
            return self.inner(x) + self.inner(x).detach()

    program = exporter.export(Stopped().eval(), (torch.randn(2, 32),), dynamo=dynamo)
    plain = onnx.inliner.inline_local_functions(program.model_proto)
    exporter.build_gradient_graph(exporter.quantize(program, weights="int4"))
    with pytest.raises(exporter.FormatError, match="stop-gradient marks"):
        exporter.build_gradient_graph(exporter.quantize(plain, weights="int4"))


def test_verify_compares_its_outputs_and_says_that_gradients_were_not(files):
    report = exporter.verify(*make(), file=files / "plain.onnx", allow=[])
    (row,) = [each for each in report.rows if not each.ok]
    assert not report.ok and (row.kind, row.problem) == ("gradients", "not compared")
    assert {each.kind for each in report.rows} == {"weight", "output", "second input", "second size", "gradients"}
    assert "5 tensors equal eager" in report.summary() and "gradients were not compared" in report.summary()
    (note,) = [each for each in report.notes if each.title == "Gradients not compared"]
    assert _LOST in note.text and "before its functions are inlined" in note.text


def test_verify_sees_another_model_in_it(files, tmp_path):
    done = CliRunner().invoke(main, ["verify", str(files / "plain.onnx"), f"{__name__}:other", "--bisect", "--json"])
    assert done.exit_code == 1, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    assert {row["kind"] for row in told["rows"] if not row["ok"]} >= {"weight", "output", "gradients"}


def test_no_shape_without_a_type_is_written(caplog):
    """onnx_ir says so of each value, many times for a model with a Loop or an operator that ONNX infers no type of."""
    caplog.set_level("WARNING", logger="onnx_ir")
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 2]>
        g (float[N, 4] raw) => (float[N, 4] out) <float[4] w = {1, 2, 3, 4}, int64 trip = {2}, bool go = {1}> {
            x = ai.onnx.ml.Scaler <offset = [0.1, 0.2, 0.3, 0.4], scale = [1.0, 2.0, 0.5, 1.5]> (raw)
            out = Loop (trip, go, x) <body = b (int64 i, bool c, float[N, 4] s) => (bool c_out, float[N, 4] s_out) {
                c_out = Identity (c)
                m = Mul (s, w)
                t = Tanh (m)
                s_out = Add (t, x)
            }>
        }""")
    exporter.build_gradient_graph(model)
    exporter.check_gradients(model)
    module = exporter.load(model)
    module(torch.randn(3, 4)).sum().backward()
    assert not [each.getMessage() for each in caplog.records if "value type" in each.getMessage()]
