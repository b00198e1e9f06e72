"""exporter.quantizer: what is declared of a Function, what the Function proves of it, and integers in a process that does not have it."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exporter
from exporter.quantization import declared
from exporter.quantization.expressions import Expression
from symbolics.node.names import QUANTIZER_PROPERTY
from tests.exporter.quantization import declared_functions as functions

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def declarations():
    before = dict(declared._declared)
    functions.declare_all()
    yield
    declared._declared.clear()
    declared._declared.update(before)


class Net(nn.Module):
    """A linear layer of a rounded weight, on what another quantiser rounds."""

    def __init__(self, activation, weight):
        super().__init__()
        self.activation, self.round_weight = activation, weight
        self.linear = nn.Linear(16, 8)
        self.s, self.alpha = nn.Parameter(torch.tensor(0.0313)), nn.Parameter(torch.tensor(3.97))
        self.ws = nn.Parameter(self.linear.weight.detach().abs().amax(1, keepdim=True) / 127)

    def forward(self, x):
        return F.linear(self.activation(self, x), self.round_weight(self, self.linear.weight), self.linear.bias)


def lsq(m, x):
    return functions.Lsq.apply(x, m.s, -128, 127)


def lsq_weight(m, w):
    return functions.Lsq.apply(w, m.ws, -127, 127)


ACTIVATIONS = {
    "lsq": lsq,
    "reciprocal": lambda m, x: functions.Reciprocal.apply(x, m.s, -128, 127),
    "halves": lambda m, x: functions.Halves.apply(x, m.s, -128, 127),
    "pact": lambda m, x: functions.Pact.apply(x, m.alpha, 8),
    "dorefa": lambda m, x: functions.Dorefa.apply(x.clamp(0, 1), 8),
    "affine": lambda m, x: functions.Affine.apply(x, m.s, 37),
    "new style": lambda m, x: functions.NewStyle.apply(x, m.s * 8),
    "the scale is computed": lambda m, x: functions.Lsq.apply(x, F.softplus(m.s.detach()) / 20, -128, 127),
}
WEIGHTS = {
    "lsq": lsq_weight,
    "reciprocal": lambda m, w: functions.Reciprocal.apply(w, m.ws, -127, 127),
    "channels": lambda m, w: functions.Channels.apply(w, m.ws.flatten(), 8),
    "4 bits": lambda m, w: functions.Channels.apply(w, m.ws.flatten() * 18, 4),
    "whole": lambda m, w: functions.Lsq.apply(w, m.ws.amax(), -127, 127),
}


def net(activation, weight):
    torch.manual_seed(0)
    return Net(ACTIVATIONS[activation], WEIGHTS[weight]).eval(), torch.randn(64, 16)


def assert_integers(quantized, model, x):
    (product,) = quantized.products
    assert product.kernel, str(quantized)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(quantized.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    with torch.no_grad():
        for seed in range(5):
            x = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
            (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
            np.testing.assert_allclose(got, model(x).numpy(), atol=1e-5)
    return product


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation(activation, dynamo):
    model, x = net(activation, "lsq")
    quantized = exporter.quantize(exporter.export(model, (x,), dynamo=dynamo))
    assert_integers(quantized, model, x)
    assert not any(node.op_type == "PythonOp" for node in quantized.model.graph)
    (found,) = quantized.activations
    assert (found.moved > 0) == (activation in ("halves", "reciprocal", "pact", "dorefa")), found


@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_weight_bit_by_bit(weight, dynamo):
    model, x = net("lsq", weight)
    quantized = exporter.quantize(exporter.export(model, (x,), dynamo=dynamo))
    assert assert_integers(quantized, model, x).bits == (4 if weight == "4 bits" else 8)
    graph = quantized.model_proto.graph
    held = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    makers = {output: node for node in graph.node for output in node.output}
    product = next(node for node in graph.node if node.op_type == "MatMul")
    levels, scale = (held[name] for name in makers[product.input[1]].input[:2])
    expected = WEIGHTS[weight](model, model.linear.weight).detach().numpy()
    assert np.array_equal(levels.T.astype(np.float32) * scale.reshape(-1, 1), expected)


def test_a_convolution_and_its_channels(dynamo):
    class Conv(nn.Conv2d):
        def forward(self, x):
            s = self.weight.detach().abs().amax((1, 2, 3)) / 127
            return self._conv_forward(x, functions.Channels.apply(self.weight, s, 8), self.bias)

    class Act(nn.Module):
        def forward(self, x):
            return functions.Lsq.apply(x, torch.tensor(0.05), -128, 127)

    torch.manual_seed(0)
    model, x = nn.Sequential(Act(), Conv(3, 5, 3), Act()).eval(), torch.randn(2, 3, 8, 8)
    quantized = exporter.quantize(exporter.export(model, (x,), dynamo=dynamo))
    assert [each.kernel for each in quantized.products] == ["QLinearConv"]


def test_another_process_without_the_functions(tmp_path):
    model, x = net("pact", "channels")
    exporter.export(model, (x,), dynamo=False).save(tmp_path / "model.onnx")
    code = f"""
import sys, json
sys.modules["tests"] = None
import exporter
quantized = exporter.quantize({str(tmp_path / "model.onnx")!r})
quantized.save({str(tmp_path / "integers.onnx")!r})
print(json.dumps([[p.kernel for p in quantized.products], "torch" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["MatMulIntegerToFloat"], False]
    (got,) = onnxruntime.InferenceSession(tmp_path / "integers.onnx").run(None, {"x": x.numpy()})
    np.testing.assert_allclose(got, model(x).detach().numpy(), atol=1e-5)


def test_the_scale_that_training_left():
    """What the file says of a scale is where it is, not what it was."""
    model, x = net("lsq", "lsq")
    program = exporter.export(model, (x,), dynamo=False)
    held = program.model.graph.initializers["s"]
    held.const_value = ir.tensor(np.array(0.05, np.float32), name="s")
    with torch.no_grad():
        model.s.fill_(0.05)
    quantized = exporter.quantize(program)
    assert quantized.activations[0].scale == pytest.approx(0.05)
    assert_integers(quantized, model, x)


def test_a_file_from_before_the_declaration():
    declared._declared.clear()
    model, x = net("lsq", "channels")
    program = exporter.export(model, (x,), dynamo=False)
    with pytest.raises(exporter.ExportError, match="exporter.quantizer"):
        exporter.quantize(program)
    functions.declare_all()
    assert_integers(exporter.quantize(program), model, x)


def test_where_a_function_became_portable(dynamo):
    """Written in operators that nobody recognises: the declaration says it, all the same."""

    class Search(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, s):
            levels = (torch.arange(-8, 8, dtype=torch.float32)) * s
            return levels[(x.clamp(-10 * s, 10 * s).unsqueeze(-1) - levels).abs().argmin(-1)]

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    class Model(nn.Linear):
        def forward(self, x):
            return F.linear(Search.apply(x, torch.tensor(0.25)), functions.Lsq.apply(self.weight, torch.tensor(0.01), -127, 127), self.bias)

    torch.manual_seed(0)
    model, x = Model(16, 8).eval(), torch.randn(4, 16)
    with pytest.raises(exporter.ExportError, match="no quantiser gives what it takes"):
        exporter.quantize(exporter.export(model, (x,), dynamo=dynamo, portable=True))
    exporter.quantizer(Search, scale="s", bits=4)
    program = exporter.export(model, (x,), dynamo=dynamo, portable=True)
    assert any(node.domain == "pythonop.portable" for node in program.model.graph)
    assert_integers(exporter.quantize(program), model, x)


WRONG = {
    "scale": ({"scale": "2 * s", "bits": ("low", "high")}, "scale='2 \\* s'.*rounds in steps of 0.0313"),
    "bits": ({"scale": "s", "bits": 4}, "bits=4 and zero_point=0.*0 to 15 or -8 to 7 or -7 to 7.*-128 to 127"),
    "ends": ({"scale": "s", "bits": ("low + 1", "high")}, r"bits=\(low \+ 1, high\).*-127 to 127.*-128 to 127"),
    "zero point": ({"scale": "s", "zero_point": 3, "bits": ("low", "high")}, "zero_point=3"),
    "half a level": ({"scale": "s", "zero_point": 0.5, "bits": 8}, "zero_point is 0.5 here, and has to be a whole number"),
    "no end": ({"scale": "s"}, "cuts something off"),
    "negative": ({"scale": "-s", "bits": 8}, "a step is a positive number"),
    "nothing": ({"scale": "s / (low - low)", "bits": 8}, "cannot be computed|a step is a positive number"),
    "axis": ({"scale": "s", "bits": 8, "axis": 2}, "axis=2, and what it rounds has 2 axes"),
    "what it rounds": ({"scale": "x", "bits": 8}, "made of it"),
    "too many": ({"scale": "s", "bits": 16}, "1 to 8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_declaration_is_an_error_that_names_function_and_argument(name, dynamo):
    given, told = WRONG[name]
    exporter.quantizer(functions.Wrong, **given)
    model, x = net("lsq", "lsq")
    model.activation = lambda m, x: functions.Wrong.apply(x, m.s, -128, 127)
    with pytest.raises(exporter.ExportError, match=told) as caught:
        exporter.export(model, (x,), dynamo=dynamo)
    assert "declared_functions:Wrong" in str(caught.value) and len(str(caught.value).splitlines()) <= 6


def test_what_rounds_all_numbers_together_is_no_quantiser():
    exporter.quantizer(functions.Statistics, scale="s")
    model, x = net("lsq", "lsq")
    model.activation = lambda m, x: functions.Statistics.apply(x, m.s)
    with pytest.raises(exporter.ExportError, match="Statistics.*computes something else"):
        exporter.export(model, (x,), dynamo=False)


def test_a_scale_of_the_input_is_left_alone():
    model, x = net("lsq", "lsq")
    model.activation = lambda m, x: functions.Lsq.apply(x, x.abs().amax() / 127, -128, 127)
    program = exporter.export(model, (x,), dynamo=False)
    assert [QUANTIZER_PROPERTY in node.metadata_props for node in program.model.graph if node.op_type == "PythonOp"] == [False, True]
    with pytest.raises(exporter.ExportError, match="no quantiser gives what it takes"):
        exporter.quantize(program)


@pytest.mark.parametrize(
    "given",
    [{"scale": "t"}, {"scale": "s", "bits": "more"}, {"scale": "s.item()"}, {"scale": True}, {"scale": "s", "axis": "0"}, {"scale": "s", "bits": (1, 2, 3)}, {"scale": lambda s: s}, {"scale": "__import__('os')"}, {"scale": "2 ** 2 ** 99", "bits": "[0]"}],
)  # fmt: skip
def test_what_cannot_be_declared(given):
    with pytest.raises(exporter.ArgumentError, match=r"exporter.quantizer\(Wrong\)"):
        exporter.quantizer(functions.Wrong, **given)
    with pytest.raises(exporter.ArgumentError, match="takes a class"):
        exporter.quantizer(functions.Wrong.apply, scale="s")


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", '{"scale":1}', "scale", "axis", "low", "inputs"],
)  # fmt: skip
def test_a_damaged_record_is_an_error(text):
    model, x = net("lsq", "lsq")
    program = exporter.export(model, (x,), dynamo=False)
    node = next(node for node in program.model.graph if QUANTIZER_PROPERTY in node.metadata_props)
    record = json.loads(node.metadata_props[QUANTIZER_PROPERTY])
    changes = {"scale": {"scale": "x1.real"}, "axis": {"axis": 7}, "low": {"low": ""}, "inputs": {"scale": "x9"}}
    node.metadata_props[QUANTIZER_PROPERTY] = json.dumps({**record, **changes[text]}) if text in changes else text
    with pytest.raises(exporter.FormatError):
        exporter.quantize(program)


@pytest.mark.parametrize(
    "text",
    ["1e999", "9**9**9**9", "2**1000", "1/0", "(-8)**0.5", "1" + "+1" * 90, "((((" * 300, "a if b else c", "x[0]", "'s'", "1j", "a and b"],
)
def test_expressions_of_strangers(text):
    with pytest.raises(exporter.FormatError):
        Expression(text).value({"a": 1.0, "b": 2.0, "x": 3.0})


def test_expressions():
    assert Expression("-(a + 2) * b ** 2 / 4 - +1").value({"a": 1.0, "b": 4.0}) == -13.0
    assert Expression(3).value({}) == 3.0
    found = Expression("alpha / (2 ** k - 1)").said_of({"alpha": "x1", "k": 8})
    assert found.names == {"x1"} and found.value({"x1": np.float32(255)}) == 1
