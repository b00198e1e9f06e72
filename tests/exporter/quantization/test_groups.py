"""Weights of 4 bits in groups: exact where a fake quantiser has left them so, rounded and told otherwise; what onnxruntime computes with them."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn

import exporter
from exporter.cli import main
from exporter.quantization import groups
from exporter.quantization.groups import fit_groups
from tests.exporter.quantization.models import MODELS, trained

pytestmark = pytest.mark.filterwarnings("ignore")


def session(path, level=None):
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if level:
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", level)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def written(path):
    """Each weight of 4 bits of a file, as ONNX defines it, in float64, by the reference of the onnx package."""
    graph = onnx.load(path).graph
    held = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    found = []
    for node in graph.node:
        block = next((a.i for a in node.attribute if a.name == "block_size"), 0)
        if node.op_type != "DequantizeLinear" or not block:
            continue
        q, scale, zero = (held[name].astype(np.float64) for name in node.input)
        assert held[node.input[0]].dtype.name == "uint4"
        scale, zero = (np.repeat(each, block, 0)[: len(q)] for each in (scale, zero))
        found.append(((q - zero) * scale).astype(np.float32))
    return found


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("kind", ["symmetric", "narrow", "zero points", "whole channels"])
def test_groups_are_found_bit_by_bit(group, kind):
    drawn = np.random.default_rng(group)
    low, high = (-7, 7) if kind == "narrow" else (-8, 7)
    levels = drawn.integers(low, high + 1, (512 // group, group, 24))
    scale = drawn.uniform(0.001, 0.1, (512 // group, 1, 24)).astype(np.float32)
    if kind == "whole channels":
        scale[:] = scale[:1]
    if kind == "zero points":
        levels = levels + drawn.integers(-7, 9, (512 // group, 1, 24))
        levels = np.clip(levels, np.minimum(levels.max(1, keepdims=True), 15) - 15, None).clip(-15, 15)
        levels = levels - np.maximum(levels.min(1, keepdims=True), 0)
        levels = np.maximum(levels, levels.max(1, keepdims=True) - 15)
    levels[0, :, 3] = 0
    weight = (levels.astype(np.float32) * scale).reshape(512, 24)
    found = fit_groups(weight, None)
    assert found.error == 0.0 and found.group >= group
    wide = (np.repeat(each, found.group, 0) for each in (found.scale, found.zero))
    scale, zero = wide
    assert np.array_equal((found.levels.astype(np.float32) - zero) * scale, weight)
    assert found.levels.max() <= 15


def test_large_weights_go_by_parts(monkeypatch):
    weight = np.random.default_rng(0).standard_normal((96, 50)).astype(np.float32)
    whole = fit_groups(weight, 32)
    exact = fit_groups(((whole.levels.astype(np.float32) - np.repeat(whole.zero, 32, 0)) * np.repeat(whole.scale, 32, 0)), 32)
    monkeypatch.setattr(groups, "_AT_ONCE", 1000)
    parts = fit_groups(weight, 32)
    assert all(np.array_equal(getattr(whole, name), getattr(parts, name)) for name in ("levels", "scale", "zero"))
    assert parts.error == pytest.approx(whole.error) and exact.error == 0
    assert fit_groups(np.zeros((40, 50), np.float32), None).error == 0


def test_one_bit_off_is_off():
    levels = np.random.default_rng(0).integers(-8, 8, (64, 4))
    weight = (levels * np.float32(0.0123)).astype(np.float32)
    weight[5, 2] = np.nextafter(weight[5, 2], np.float32(9))
    assert fit_groups(weight, 32).error > 0


@pytest.mark.parametrize("rows", [2, 31, 33, 100, 256])
def test_rounding_is_no_worse_than_by_the_largest_number(rows):
    """Against the plain way: the largest number of a group is level 7."""
    weight = np.random.default_rng(rows).standard_normal((rows, 40)).astype(np.float32)
    found = fit_groups(weight, 32)
    padded = np.pad(weight, ((0, -rows % 32), (0, 0))).reshape(-1, 32, 40)
    scale = np.abs(padded).max(1, keepdims=True) / 7
    plain = (np.rint(padded / scale) * scale).reshape(-1, 40)[:rows]
    expected = np.sqrt(((plain - weight) ** 2).mean() / (weight**2).mean())
    assert 0 < found.error < expected


class Grouped(nn.Linear):
    """Its weight rounded to 4 bits in groups, as torchao does while it trains."""

    group = 64

    def forward(self, x):
        w = self.weight.reshape(self.out_features, -1, self.group)
        s = (w.detach().abs().amax(-1, keepdim=True) / 7.5).clamp(min=1e-8)
        q = torch.clamp(torch.round(w / s), -8, 7) * s
        return F.linear(x, (w + (q - w).detach()).reshape(self.weight.shape), self.bias)

    def rounded(self):
        w = self.weight.detach().reshape(self.out_features, -1, self.group)
        s = (w.abs().amax(-1, keepdim=True) / 7.5).clamp(min=1e-8)
        return (torch.clamp(torch.round(w / s), -8, 7) * s).reshape(self.weight.shape).T.numpy()


def net(linear, width=256):
    torch.manual_seed(0)
    return nn.Sequential(linear(width, 128), nn.ReLU(), linear(128, 64, bias=False)).eval(), torch.randn(3, width)


def test_fake_quantised_weights_stay_what_they_are(dynamo, tmp_path):
    model, x = net(Grouped)
    quantized = exporter.quantize(exporter.export(model, (x,), dynamo=dynamo, dynamic_shapes=({0: "batch"},)), weights="int4")
    assert [(each.kernel, each.bits, each.error) for each in quantized.products] == [("MatMulNBits", 4, 0.0)] * 2
    assert "2 of them by weights of 4 bits, bit by bit the model's" in str(quantized)
    quantized.save(tmp_path / "int4.onnx")
    onnx.checker.check_model(tmp_path / "int4.onnx", full_check=True)
    for one, layer in zip(written(tmp_path / "int4.onnx"), (model[0], model[2]), strict=True):
        assert np.array_equal(one, layer.rounded())
    with torch.no_grad():
        for batch in (1, 5):
            x = torch.randn(batch, 256)
            expected = model(x).numpy()
            norm = np.linalg.norm(expected)
            (inside,), (exact,) = (session(tmp_path / "int4.onnx", level).run(None, {"input": x.numpy()}) for level in ("4", "1"))
            assert np.linalg.norm(exact - expected) < 1e-5 * norm
            assert 1e-4 * norm < np.linalg.norm(inside - expected) < 1.5e-2 * norm  # the kernel rounds what it takes to 8 bits


@pytest.mark.parametrize("group", [None, 16, 128])
def test_float_weights_are_rounded(dynamo, group, tmp_path):
    model, x = net(nn.Linear)
    program = exporter.export(model, (x,), dynamo=dynamo)
    quantized = exporter.quantize(program, weights="int4", group=group)
    quantized.save(tmp_path / "int4.onnx")
    weights = [layer.weight.detach().numpy().T for layer in (model[0], model[2])]
    for row, one, weight in zip(quantized.products, written(tmp_path / "int4.onnx"), weights, strict=True):
        assert row.error == pytest.approx(np.linalg.norm(one - weight) / np.linalg.norm(weight), rel=1e-4)
        assert 0.03 < row.error < 0.1
    with torch.no_grad():
        expected = (
            np.maximum(x.numpy() @ written(tmp_path / "int4.onnx")[0] + model[0].bias.numpy(), 0) @ written(tmp_path / "int4.onnx")[1]
        ).astype(np.float32)
    (got,) = session(tmp_path / "int4.onnx", "1").run(None, {"input": x.numpy()})
    np.testing.assert_allclose(got, expected, atol=1e-5)
    found = quantized.compare({"input": x.numpy()})
    assert 0 < next(iter(found.outputs.values())) < 0.5
    loaded = exporter.load(tmp_path / "int4.onnx")
    x = x.requires_grad_()
    loaded(x).sum().backward()
    assert x.grad.abs().sum() > 0 and (tmp_path / "int4.onnx").stat().st_size < 0.3 * len(program.model_proto.SerializeToString())


@pytest.mark.parametrize("between", [nn.ReLU, nn.ReLU6, nn.Identity, nn.Tanh, lambda: nn.Hardtanh(-2, 2)])
def test_what_stands_between_two_of_them(between):
    """onnxruntime takes a Relu or Clip for a part of the product before it."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64, bias=False), between(), nn.Linear(64, 32, bias=False), between()).eval(), torch.randn(3, 64)
    quantized = exporter.quantize(exporter.export(model, (x,), dynamo=False), weights="int4")
    assert [each.kernel for each in quantized.products] == ["MatMulNBits"] * 2
    (got,) = session(quantized.model_proto.SerializeToString()).run(None, {"input": x.numpy()})
    assert np.linalg.norm(got - model(x).detach().numpy()) < 0.15 * np.linalg.norm(got)


@pytest.mark.unusable("onnxruntime has no kernel for bfloat16: the integers are what can be run")
def test_weights_that_are_computed_in_bfloat16(dynamo):
    """onnxruntime has no kernel for that: ONNX's reference computes them."""

    class Model(nn.Linear):
        def forward(self, x):
            return F.linear(x, (self.weight.bfloat16() * torch.tensor(1.5, dtype=torch.bfloat16)).float(), self.bias)

    torch.manual_seed(0)
    model, x = Model(64, 32).eval(), torch.randn(3, 64)
    program = (
        exporter.export(model, (x,), dynamo=dynamo, optimize=False)
        if dynamo
        else exporter.export(model, (x,), dynamo=False, do_constant_folding=False)
    )
    quantized = exporter.quantize(program, weights="int4")
    assert quantized.products[0].kernel == "MatMulNBits" and 0 < quantized.products[0].error < 0.1


def test_beside_products_in_integers(dynamo):
    """What has both quantisers stays in 8 bits; the rest gets weights of 4."""
    model, args = trained(MODELS["transformer"])
    program = exporter.export(model, args, dynamo=dynamo, portable=True)
    kernels = [each.kernel for each in exporter.quantize(program, weights="int4").products]
    assert kernels.count("MatMulIntegerToFloat") == 6 and "MatMulNBits" not in kernels
    mixed = nn.Sequential(model, nn.Linear(32, 48)).eval()
    quantized = exporter.quantize(exporter.export(mixed, args, dynamo=dynamo, portable=True), weights="int4")
    assert sorted(each.kernel for each in quantized.products) == ["", "", *["MatMulIntegerToFloat"] * 6, "MatMulNBits"]


def test_what_stays_in_float():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear, self.stack = nn.Conv2d(2, 3, 3), nn.Linear(108, 8), nn.Parameter(torch.randn(3, 8, 5))

        def forward(self, x):
            return self.linear(self.conv(x).flatten(1)) @ self.stack

    program = exporter.export(Model().eval(), (torch.randn(1, 2, 8, 8),), dynamo=False)
    kernels = {each.operator: each.kernel for each in exporter.quantize(program, weights="int4").products}
    assert kernels["Conv"] == "" and kernels["Gemm"] == "MatMulNBits"


@pytest.mark.parametrize("opset", [18, 20, 21])
def test_opsets(opset):
    model, x = net(nn.Linear)
    program = exporter.export(model, (x,), opset_version=opset, dynamo=False)
    quantized = exporter.quantize(program, weights="int4")
    assert quantized.model.opset_imports[""] == max(opset, 21)


def test_an_operator_that_changed_its_meaning_is_named():
    class Model(nn.Linear):
        def forward(self, x):
            grid = torch.zeros(1, 4, 4, 2)
            return super().forward(F.grid_sample(x, grid, align_corners=False).flatten(1))

    x = torch.randn(1, 2, 5, 5)
    program = exporter.export(Model(32, 4).eval(), (x,), dynamo=False, opset_version=18)
    with pytest.raises(exporter.ExportError, match="GridSample.*\n.*opset_version=21"):
        exporter.quantize(program, weights="int4")


def test_bad_arguments(tmp_path):
    model, x = net(nn.Linear)
    program = exporter.export(model, (x,), dynamo=False)
    for given in ({"weights": "int3"}, {"weights": 4}, {"weights": "int4", "group": 33}, {"group": 32}, {"weights": "int4", "group": True}):
        with pytest.raises(exporter.ArgumentError, match="exporter.quantize: (weights|group) is"):
            exporter.quantize(program, **given)
    with pytest.raises(exporter.ExportError, match="float16"):
        exporter.quantize(exporter.export(model.half(), (x.half(),), dynamo=False), weights="int4")
    with pytest.raises(exporter.ExportError, match="nothing in the model"):
        exporter.quantize(exporter.export(nn.ReLU(), (x,), dynamo=False), weights="int4")


def test_the_command(tmp_path):
    model, x = net(Grouped)
    exporter.export(model, (x,), dynamo=False).save(tmp_path / "model.onnx")
    arguments = ["quantize", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "int4.onnx"), "--weights", "int4"]
    done = CliRunner().invoke(main, [*arguments, "--group", "64", "--compare", "2", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert [each["kernel"] for each in told["products"]] == ["MatMulNBits"] * 2 and told["compared"]["outputs"]
    assert CliRunner().invoke(main, [*arguments, "--group", "63"]).exit_code == 2


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(16, 64), nn.Linear(64, 4)

    def forward(self, ids):
        return self.head(self.words(ids).mean(1))


def test_nothing_is_compared_on_zeros(tmp_path):
    """Ids are not made up: on zeros alone the outputs are the same, whatever the weights are."""
    torch.manual_seed(0)
    exporter.export(Words(), (torch.randint(0, 16, (2, 5)),)).save(tmp_path / "words.onnx")
    arguments = ["quantize", str(tmp_path / "words.onnx"), "-o", str(tmp_path / "int4.onnx"), "--weights", "int4", "--compare", "3"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2 and "nothing makes up ids" in done.output and "--inputs" in done.output
    np.savez(tmp_path / "ids.npz", ids=np.random.default_rng(0).integers(0, 16, (2, 5)))
    done = CliRunner().invoke(main, [*arguments, "--inputs", str(tmp_path / "ids.npz")])
    assert done.exit_code == 0, done.output
