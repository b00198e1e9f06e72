"""QONNX, written and read: beside eager and beside the project's published definition of its operators, in numpy."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import nn

import exporter
from exporter.cli import main
from exporter.quantization.qonnx import _range
from tests.exporter.quantization.models import MODELS, image, rows, trained
from tests.exporter.quantization.quantizers import Act, Linear
from tests.support import missing

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.unusable("onnxruntime does not run QONNX")]

DOMAIN = "qonnx.custom_op.general"
ROUNDINGS = {
    "ROUND": np.rint,
    "CEIL": np.ceil,
    "FLOOR": np.floor,
    "UP": lambda x: np.sign(x) * np.ceil(np.abs(x)),
    "DOWN": np.trunc,
    "HALF_UP": lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5),
    "HALF_DOWN": lambda x: np.sign(x) * np.ceil(np.abs(x) - 0.5),
}


def quant(x, scale, zeropt, bitwidth, signed=1, narrow=0, rounding_mode="ROUND"):
    """From docs/qonnx-custom-ops/intquant_v1.md, in our words."""
    bits = int(bitwidth)
    lowest = (-(2 ** (bits - 1)) + narrow) if signed else 0
    highest = 2 ** (bits - 1) - 1 if signed else 2**bits - 1 - narrow
    q = np.minimum(np.maximum(x / scale + zeropt, lowest), highest)
    return ((ROUNDINGS[rounding_mode.upper()](q) - zeropt) * scale).astype(np.float32)


class Quant(OpRun):
    op_domain = DOMAIN

    def _run(self, x, scale, zeropt, bitwidth, signed=1, narrow=0, rounding_mode="ROUND"):
        assert scale.ndim in (0, x.ndim) and zeropt.ndim in (0, x.ndim)
        return (quant(x, scale, zeropt, bitwidth, signed, narrow, rounding_mode),)


class BipolarQuant(OpRun):
    op_domain = DOMAIN

    def _run(self, x, scale):
        return (np.where(x >= 0, 1.0, -1.0).astype(np.float32) * scale,)


def reference(model):
    return ReferenceEvaluator(model, new_ops=[Quant, BipolarQuant])


WRITTEN = [
    "mlp ste", "mlp lsq", "mlp fake", "mlp, activations asymmetric", "mlp, activations pact", "mlp, activations lsq+", "narrow range", "7 bits",
    "conv ste", "conv fake", "conv 2 bits", "conv 4 bits", "whole weights", "asymmetric weight", "residual", "transformer, whole", "beside lstm", "float weight",
]  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_computes_what_the_model_does(name, dynamo):
    model, args = trained(MODELS[name])
    written = exporter.to_qonnx(exporter.export(model, args, dynamo=dynamo, portable=True))
    proto = written.model_proto
    onnx.checker.check_model(proto)
    nodes = [node for node in proto.graph.node if node.domain == DOMAIN]
    assert len(nodes) == len(written.quantizers) and {node.op_type for node in nodes} == {"Quant"}
    run = reference(proto)
    with torch.no_grad():
        for _ in range(3):
            given = [torch.randn_like(x) for x in args]
            (got,) = run.run(None, {value.name: x.numpy() for value, x in zip(proto.graph.input, given, strict=True)})
            expected = model(*given).numpy()
            # A sum in another order falls on the other side of a threshold now and then.
            assert np.linalg.norm(got - expected) < (2e-2 if name.startswith("conv") or name == "residual" else 2e-3) * np.linalg.norm(
                expected
            )


def test_bits_and_ranges():
    found = {}
    for name in ("narrow range", "7 bits", "conv 2 bits", "mlp, activations asymmetric", "asymmetric weight"):
        written = exporter.to_qonnx(exporter.export(*trained(MODELS[name]), dynamo=False, portable=True))
        found[name] = {(each.weight, each.bits, each.signed, each.narrow, each.zero_point) for each in written.quantizers}
    assert found["narrow range"] == {(False, 8, True, True, 0), (True, 8, True, True, 0)}
    assert found["7 bits"] == {(False, 7, False, False, 0), (True, 8, True, True, 0)}
    assert (True, 8, True, True, 0) in found["asymmetric weight"]
    assert (False, 8, False, False, 37) in found["mlp, activations asymmetric"]
    assert (False, 2, True, False, 0) in found["conv 2 bits"] and (False, 2, False, False, 0) in found["conv 2 bits"]


@pytest.mark.parametrize("low", [-255, -128, -127, -60, -9, -2, -1, 0, 3])
@pytest.mark.parametrize("high", [-3, 0, 1, 7, 127, 128, 195, 255])
@pytest.mark.parametrize("shift", [False, True])
def test_every_range_is_inside_of_what_its_bits_say(low, high, shift):
    if not low < high <= low + 255:
        return
    bits, narrow, zero = _range(low, high, shift=shift)
    signed = low < 0 and not zero
    lowest = (-(2 ** (bits - 1)) + narrow) if signed else 0
    highest = 2 ** (bits - 1) - 1 if signed else 2**bits - 1 - narrow
    assert lowest - zero <= low and high <= highest - zero and (shift or zero == 0)
    assert bits <= (8 if shift or low >= 0 else 9)
    assert not narrow or lowest - zero - 1 < low


def test_weights_are_the_models_bit_by_bit():
    model, args = trained(MODELS["conv ste"])
    proto = exporter.to_qonnx(exporter.export(model, args, dynamo=False, portable=True)).model_proto
    held = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    makers = {output: node for node in proto.graph.node for output in node.output}
    convolutions = [node for node in proto.graph.node if node.op_type == "Conv"]
    layers = [module for module in model if hasattr(module, "quantized") and module.weight.ndim == 4]
    assert len(convolutions) == len(layers) == 3
    for node, layer in zip(convolutions, layers, strict=True):
        maker = makers[node.input[1]]
        attributes = {a.name: a.i if a.type == 2 else a.s.decode() for a in maker.attribute}
        assert np.array_equal(quant(*(held[name] for name in maker.input), **attributes), layer.quantized().detach().numpy())
        assert held[maker.input[1]].shape == (layer.weight.shape[0], 1, 1, 1)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s):
        return torch.where(x >= 0, 1.0, -1.0) * s

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Binary(nn.Module):
    """Weights and activations of one bit; steps of the weights by channels."""

    def __init__(self):
        super().__init__()
        self.f, self.g, self.s = nn.Linear(15, 11), nn.Linear(11, 4), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        x = torch.nn.functional.linear(
            Sign.apply(x, torch.tensor(1.0)), Sign.apply(self.f.weight, self.f.weight.detach().abs().mean(1, keepdim=True))
        )
        return torch.nn.functional.linear(Sign.apply(x, self.s), Sign.apply(self.g.weight, self.g.weight.detach().abs().mean()))


def test_one_bit(dynamo):
    torch.manual_seed(0)
    model, x = Binary().eval(), torch.randn(8, 15)  # odd numbers: no sum is 0
    x[0, :4] = 0.0
    written = exporter.to_qonnx(exporter.export(model, (x,), dynamo=dynamo, portable=True))
    assert [each.operator for each in written.quantizers] == ["BipolarQuant"] * 4 and sum(each.weight for each in written.quantizers) == 2
    (got,) = reference(written.model_proto).run(None, {written.model.graph.inputs[0].name: x.numpy()})
    np.testing.assert_allclose(got, model(x).detach().numpy(), atol=1e-5)


def test_a_sign_that_is_0_at_0_is_none():
    class Model(Linear):
        def forward(self, x):
            return super().forward(torch.sign(x) * 0.5)

    program = exporter.export(Model(16, 4).eval(), (torch.randn(2, 16),), dynamo=False, portable=True)
    assert [each.operator for each in exporter.to_qonnx(program).quantizers] == ["Quant"]


def test_thresholds_that_the_definition_moves_are_counted():
    """It adds the zero point before it rounds: halves go the other way where that is odd."""
    model, args = trained(MODELS["mlp, activations asymmetric"])
    written = exporter.to_qonnx(exporter.export(model, args, dynamo=False, portable=True))
    rows = [each for each in written.quantizers if not each.weight]
    scale, zero = np.float32(model[0].s.item()), np.float32(37)
    halves = ((np.arange(-37, 218) + 0.5) * np.float64(scale)).astype(np.float32)
    near = np.sort((halves.view(np.int32)[:, None] + np.arange(-3000, 3001, dtype=np.int32)).view(np.float32), 1)
    ours = (np.rint(near / scale) == np.rint(near[:, :1] / scale)).sum(1)
    theirs = (np.rint(near / scale + zero) == np.rint(near[:, :1] / scale + zero)).sum(1)
    assert rows[0].moved == (ours != theirs).sum() > 0 and rows[0].floats == np.abs(ours - theirs).max()
    assert "thresholds of activations moved by" in str(written)


@pytest.mark.parametrize("name", ["mlp, activations asymmetric", "conv 4 bits", "transformer, whole", "one bit"])
def test_the_packages_own_execution(name, tmp_path):
    """Nodes as their project runs them."""
    if importlib.util.find_spec("qonnx") is None:
        missing("packages", "qonnx is not installed")
    torch.manual_seed(0)
    model, args = (Binary().eval(), (torch.randn(8, 15),)) if name == "one bit" else trained(MODELS[name])
    written = exporter.to_qonnx(exporter.export(model, args, dynamo=False, portable=True))
    written.save(tmp_path / "qonnx.onnx")
    wrapper = importlib.import_module("qonnx.core.modelwrapper").ModelWrapper(str(tmp_path / "qonnx.onnx"))
    wrapper = wrapper.transform(importlib.import_module("qonnx.transformation.infer_shapes").InferShapes())
    feeds = {written.model.graph.inputs[0].name: args[0].numpy()}
    (got,) = importlib.import_module("qonnx.core.onnx_exec").execute_onnx(wrapper, feeds).values()
    np.testing.assert_allclose(got, model(*args).detach().numpy(), atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------- reading
def one(op_type, inputs, domain=DOMAIN, **attributes):
    """A model of one node."""
    names = [f"i{i}" for i in range(len(inputs))]
    node = helper.make_node(op_type, ["x", *names], ["y"], domain=domain, name="one", **attributes)
    held = [numpy_helper.from_array(np.asarray(each), name) for each, name in zip(inputs, names, strict=True)]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 3, 50]) for name in "xy")
    graph = helper.make_graph([node], "g", [x], [y], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(domain, 1)], ir_version=9)


def values(scale=0.3):
    drawn = (np.random.default_rng(0).standard_normal((4, 3, 50)) * 5).astype(np.float32)
    drawn[0, 0, :40] = (np.arange(-20, 20) / 2 * np.float32(scale)).astype(np.float32)  # ties
    drawn[1, 1, :3] = 0.0, -0.0, 1e30
    return drawn


def run(proto, x):
    return onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


@pytest.mark.parametrize("mode", [*ROUNDINGS, "round", "floor"])
@pytest.mark.parametrize("zero", [0.0, 3.0, "channels"])
def test_reading_is_the_definition(mode, zero):
    f = np.float32
    zeros = np.array([0, 1, -2], f).reshape(1, 3, 1) if zero == "channels" else f(zero)
    scale = np.array([0.3, 0.7, 1.1], f).reshape(1, 3, 1) if zero == "channels" else f(0.3)
    for bits, signed, narrow in ((8, 1, 0), (4, 1, 1), (3, 0, 0), (5, 0, 1), (1, 0, 0)):
        for width in (f(bits), np.int32(bits), np.array([bits], f)):
            proto = one("IntQuant", [scale, zeros, width], signed=signed, narrow=narrow, rounding_mode=mode)
            x = values()
            np.testing.assert_array_equal(
                run(exporter.from_qonnx(proto).model_proto, x), quant(x, scale, zeros, bits, signed, narrow, mode)
            )


@pytest.mark.parametrize("domain", [DOMAIN, "onnx.brevitas", "finn.custom_op.general"])
def test_domains_and_bipolar(domain):
    x, scale = values(), np.float32(0.25)
    np.testing.assert_array_equal(
        run(exporter.from_qonnx(one("BipolarQuant", [scale], domain)).model_proto, x), np.where(x >= 0, scale, -scale)
    )
    np.testing.assert_array_equal(
        run(exporter.from_qonnx(one("Quant", [scale, np.float32(0), np.float32(8)], domain)).model_proto, x), quant(x, scale, 0, 8)
    )


@pytest.mark.parametrize("name", ["mlp lsq", "conv ste", "conv 4 bits", "mlp, activations asymmetric"])
def test_there_and_back(name, tmp_path):
    """A file of QONNX, read again, computes what the model does, and is quantised to the same integers."""
    model, args = trained(MODELS[name])
    program = exporter.export(model, args, dynamo=False, portable=True)
    exporter.to_qonnx(program).save(tmp_path / "qonnx.onnx")
    back = exporter.from_qonnx(tmp_path / "qonnx.onnx")
    x = args[0].numpy()
    session = onnxruntime.InferenceSession(back.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: x})
    assert np.linalg.norm(got - model(*args).detach().numpy()) < 2e-2 * np.linalg.norm(got)
    one, other = exporter.quantize(program), exporter.quantize(tmp_path / "qonnx.onnx")
    assert [each.kernel for each in one.products] == [each.kernel for each in other.products] and all(
        each.kernel for each in other.products
    )
    assert [(a.scale, a.zero_point, a.low, a.high) for a in one.activations] == [
        (a.scale, a.zero_point, a.low, a.high) for a in other.activations
    ]
    written = [
        [numpy_helper.to_array(t) for t in each.model_proto.graph.initializer if t.data_type == TensorProto.INT8 and len(t.dims) > 1]
        for each in (one, other)
    ]
    assert all(np.array_equal(a, b) for a, b in zip(*written, strict=True))
    again = exporter.to_qonnx(tmp_path / "qonnx.onnx").quantizers
    assert [(q.bits, q.signed, q.narrow, q.zero_point) for q in again] == [
        (q.bits, q.signed, q.narrow, q.zero_point) for q in exporter.to_qonnx(program).quantizers
    ]


BAD = {
    "bits": (("Quant", [np.float32(1), np.float32(0), np.float32(2.5)]), "bit width is 2.5"),
    "many bits": (("Quant", [np.float32(1), np.float32(0), np.float32(1e9)]), "bit width is 1e"),
    "nan bits": (("Quant", [np.float32(1), np.float32(0), np.float32(np.nan)]), "bit width"),
    "two bits": (("Quant", [np.float32(1), np.float32(0), np.ones(2, np.float32)]), "no constant number"),
    "inputs": (("Quant", [np.float32(1)]), "with four inputs"),
    "another": (("Trunc", [np.float32(1), np.float32(0), np.float32(8), np.float32(4)]), "Quant and IntQuant"),
    "float": (("FloatQuant", [np.float32(1)]), "Quant and IntQuant"),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_nodes_are_named(name):
    given, told = BAD[name]
    for read in (exporter.from_qonnx, exporter.quantize):
        with pytest.raises(exporter.FormatError, match=told) as caught:
            read(one(*given))
        assert "one" in str(caught.value) and len(str(caught.value).splitlines()) <= 6
    with pytest.raises(exporter.FormatError, match="no rounding mode"):
        exporter.from_qonnx(one("Quant", [np.float32(1), np.float32(0), np.float32(4)], rounding_mode="SIDEWAYS"))


def test_nothing_to_write_or_to_read():
    floats = exporter.export(nn.Linear(3, 2), (torch.randn(2, 3),), dynamo=False)
    with pytest.raises(exporter.ExportError, match="nothing in the model is quantised"):
        exporter.to_qonnx(floats)
    with pytest.raises(exporter.FormatError, match="no quantiser of QONNX"):
        exporter.from_qonnx(floats)


def test_the_command(tmp_path):
    model, x = nn.Sequential(Act(signed=True), Linear(32, 8)).eval(), rows()
    exporter.export(model, x, dynamo=False, portable=True).save(tmp_path / "model.onnx")

    def call(source, to, form, *more):
        return CliRunner().invoke(main, ["quantize", str(tmp_path / source), "-o", str(tmp_path / to), "--to", form, *more])

    done = call("model.onnx", "qonnx.onnx", "qonnx", "--json")
    assert done.exit_code == 0, done.output
    assert [each["operator"] for each in json.loads(done.output)["quantizers"]] == ["Quant"] * 2
    assert "2 quantisers of QONNX, 1 of weights" in call("model.onnx", "qonnx.onnx", "qonnx").output
    assert call("qonnx.onnx", "floats.onnx", "floats").exit_code == 0
    assert call("qonnx.onnx", "integers.onnx", "integers").exit_code == 0
    (got,) = onnxruntime.InferenceSession(tmp_path / "floats.onnx").run(None, {"input": x[0].numpy()})
    np.testing.assert_allclose(got, model(*x).detach().numpy(), atol=1e-5)
    assert call("model.onnx", "wrong.onnx", "floats").exit_code == 2 and not (tmp_path / "wrong.onnx").exists()
    assert call("model.onnx", "wrong.onnx", "qonnx", "--weights", "int4").exit_code == 2


def test_images_keep_their_shapes():
    model, args = trained(MODELS["conv ste"])
    written = exporter.to_qonnx(exporter.export(model, args, dynamo=False, portable=True))
    assert written.model.graph.outputs[0].shape == exporter.export(model, args, dynamo=False).model.graph.outputs[0].shape
    assert image()[0].shape == args[0].shape
