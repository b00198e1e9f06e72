"""Fake-quantised models, as tools and people write them, and what integers come of each: beside eager, on both exporters."""

from __future__ import annotations

import importlib.util

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.ao.quantization as ao
from torch import nn

import exporter
from tests.exporter.quantization.models import BEHIND, MODELS, Case, image, trained
from tests.exporter.quantization.quantizers import Act, Conv, Linear
from tests.exporter.quantization.tools import BREVITAS, PT2E, TORCH_AO, TORCHAO
from tests.support import missing

pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = (
    "conv ste", "conv fake", "mlp lsq", "mlp where", "mlp, activations zero inside", "dorefa", "residual", "two branches", "transformer, whole",
    "beside lstm", "lstm by hand", "depthwise", "detector", "at outputs", "matmul", "transposed", "float weight", "nothing behind", "negative gains",
)  # fmt: skip
REFUSED = {name for name, case in MODELS.items() if not case.integers}


def session(path, level=None):
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if level is not None:
        options.graph_optimization_level = level
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def again(tensor):
    return torch.randn_like(tensor) if tensor.is_floating_point() else torch.randint_like(tensor, 0, 50)


def both(path, model, args, count):
    """What the file gives, and what the model does."""
    run = session(path)
    for _ in range(count):
        given = [again(each) for each in args]
        with torch.no_grad():
            expected = [each.numpy() for each in torch.utils._pytree.tree_leaves(model(*given))]
        results = run.run(None, {each.name: x.numpy() for each, x in zip(run.get_inputs(), given, strict=True)})
        assert [(each.shape, each.dtype) for each in results] == [(each.shape, each.dtype) for each in expected]
        yield results, expected


def assert_in_integers(case: Case, model, args, dynamo, folder, count=20):
    """The products, the reasons, the numbers; and that the file is of use."""
    program = exporter.export(model, args, dynamo=dynamo, portable=True, **(case.options or {}))
    quantized = exporter.quantize(program)
    kernels = [bool(each.kernel) for each in quantized.products]
    assert (sum(kernels), len(kernels)) == (case.integers, case.products), str(quantized)
    assert case.says in str(quantized)
    assert all(bool(each.kernel) != bool(each.reason) for each in quantized.products)
    path, before = folder / "quantized.onnx", folder / "float.onnx"
    quantized.save(path)
    program.save(before)
    onnx.checker.check_model(path, full_check=True)
    assert path.stat().st_size < before.stat().st_size
    worst, off, total = 0.0, 0.0, 0.0
    convolutions = any(each.operator == "Conv" and each.kernel for each in quantized.products)
    for results, expected in both(path, model, args, count):
        for one, other in zip(results, expected, strict=True):
            apart = np.abs(one.astype(np.float64) - other) / max(float(np.abs(other).max()), 1e-9)
            worst, off, total = max(worst, float(apart.max())), off + float((apart**2).sum()), total + apart.size
    # Biases of convolutions are rounded to int32: now and then a level is another one, and what follows has it in its sums.
    low = any(0 < each.bits < 5 for each in quantized.products)
    assert (off / total) ** 0.5 < ((0.2 if low else 3e-2) if convolutions else 2e-3), (worst, (off / total) ** 0.5)
    loaded = exporter.load(path)
    with torch.no_grad():
        for one, other in zip(*(torch.utils._pytree.tree_leaves(each(*args)) for each in (loaded, model)), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=(2.0 if low else 0.1) * float(other.abs().max()))
    exporter.build_gradient_graph(path)
    return quantized


@pytest.mark.parametrize("name", QUICK)
def test_a_model(name, dynamo, tmp_path):
    assert_in_integers(MODELS[name], *trained(MODELS[name]), dynamo, tmp_path)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in QUICK and name not in REFUSED])
def test_more_models(name, dynamo, tmp_path):
    assert_in_integers(MODELS[name], *trained(MODELS[name]), dynamo, tmp_path)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_reason(name, dynamo):
    """What no integer kernel knows is named: the rounding, and why."""
    model, args = trained(MODELS[name])
    with pytest.raises(exporter.ExportError, match=MODELS[name].says) as caught:
        exporter.quantize(exporter.export(model, args, dynamo=dynamo, portable=True))
    assert "way out" in str(caught.value)


@pytest.mark.parametrize("name", ["eager fbgemm", "fx mlp"])
def test_torch_ao(name, dynamo, tmp_path):
    torch.manual_seed(0)
    assert_in_integers(TORCH_AO[name], *TORCH_AO[name].make(), dynamo, tmp_path)


@pytest.mark.parametrize("name", sorted(TORCH_AO.keys() - {"eager fbgemm", "fx mlp"}))
def test_more_of_torch_ao(name, dynamo, tmp_path):
    torch.manual_seed(0)
    assert_in_integers(TORCH_AO[name], *TORCH_AO[name].make(), dynamo, tmp_path)


@pytest.mark.parametrize("name", PT2E)
def test_pt2e(name, dynamo, tmp_path):
    if importlib.util.find_spec("torchao") is None:
        missing("packages", "torchao is not installed")
    torch.manual_seed(0)
    assert_in_integers(PT2E[name], *PT2E[name].make(), dynamo, tmp_path)


@pytest.mark.parametrize("name", TORCHAO)
def test_torchao(name, dynamo, tmp_path):
    """Its weights of 4 bits stay bit by bit what they are; what it rounds token by token stays in float."""
    if importlib.util.find_spec("torchao") is None:
        missing("packages", "torchao is not installed")
    torch.manual_seed(0)
    make, off = TORCHAO[name]
    model, args = make()
    quantized = exporter.quantize(exporter.export(model, args, dynamo=dynamo, portable=True), weights="int4")
    assert [each.kernel for each in quantized.products] == ["MatMulNBits"] * 2
    assert all(each.error <= off and bool(each.error) == bool(off) for each in quantized.products)
    quantized.save(tmp_path / "quantized.onnx")
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    run = onnxruntime.InferenceSession(tmp_path / "quantized.onnx", options, providers=["CPUExecutionProvider"])
    (got,) = run.run(None, {run.get_inputs()[0].name: args[0].numpy()})
    expected = model(*args).detach().numpy()
    assert np.linalg.norm(got - expected) <= (1e-5 if not off else 2 * off) * np.linalg.norm(expected)


@pytest.mark.parametrize("name", BREVITAS)
def test_brevitas(name, dynamo, tmp_path):
    if importlib.util.find_spec("brevitas") is None:
        missing("packages", "brevitas is not installed")
    torch.manual_seed(0)
    model, args = BREVITAS[name].make()
    if dynamo and "bias" in name:  # values that carry scales compare them in Python
        with pytest.raises(exporter.ExportError, match="data-dependent"):
            exporter.export(model, args, portable=True)
        return
    assert_in_integers(BREVITAS[name], model, args, dynamo, tmp_path)


def optimized(quantized, folder):
    """The operators that onnxruntime makes of a model."""
    quantized.save(folder / "quantized.onnx")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(folder / "optimized.onnx"), 4
    onnxruntime.InferenceSession(folder / "quantized.onnx", options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node]


@pytest.mark.parametrize(
    "between",
    [nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Softmax(-1), nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 2), nn.BatchNorm2d(4)],
    ids=lambda module: type(module).__name__,
)
def test_what_is_between_quantisers_stays_in_float(between, tmp_path):
    """onnxruntime would compute it in integers that round otherwise, a float weight among them."""
    model = nn.Sequential(Act(signed=True), Conv(3, 4, 3), nn.ReLU(), Act(step=0.0125), between, Act(signed=True, step=0.0125)).eval()
    quantized = exporter.quantize(exporter.export(model, image(size=8), dynamo=False, portable=True))
    made = optimized(quantized, tmp_path)
    assert [name for name in made if name.startswith("QLinear")] == ["QLinearConv"]
    # The convolution itself: a bias in int32.
    moved = [np.abs(one - other).max() for (one,), (other,) in both(tmp_path / "quantized.onnx", model, image(size=8), 10)]
    assert np.median(moved) < 1e-6


def test_sums_of_quantised_values_have_the_ties_of_the_model(tmp_path):
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.f = (
                Act(signed=True, step=0.02),
                Act(signed=True, step=0.02),
                Act(signed=True, step=0.04),
                Linear(16, 4),
            )

        def forward(self, x, y):
            return self.f(self.c(self.a(x) + self.b(y))), self.c(self.a(x) * self.b(y))

    model, args = Sums().eval(), (torch.randn(8, 16), torch.randn(8, 16))
    quantized = exporter.quantize(exporter.export(model, args, dynamo=False, portable=True))
    assert not {"QLinearAdd", "QLinearMul"} & set(optimized(quantized, tmp_path))
    for results, expected in both(tmp_path / "quantized.onnx", model, args, 20):
        for one, other in zip(results, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_bias_in_int32_moves_as_many_levels_as_the_report_says(bits, tmp_path):
    model = nn.Sequential(Act(signed=True, bits=8), Conv(3, 32, 3, bits=bits), nn.BatchNorm2d(32), nn.ReLU(), Act(bits=8, step=0.01)).eval()
    with torch.no_grad():
        model[2].bias.uniform_(-0.5, 0.5)
    args = image(size=24, batch=4)
    quantized = exporter.quantize(exporter.export(model, args, dynamo=False, portable=True))
    quantized.save(tmp_path / "quantized.onnx")
    levels = [np.abs(np.rint((one - other) / 0.01)) for (one,), (other,) in both(tmp_path / "quantized.onnx", model, args, 10)]
    assert np.max(levels) <= 1
    share, (product,) = float(np.mean(levels)), quantized.products
    assert share <= 1.5 * product.moved + 1e-5
    assert product.bits == bits
    assert product.moved < 3e-3  # in steps that are finer by a power of two where there are levels to spare


def test_linear_layers_keep_their_biases(tmp_path):
    """In float, and in the state: a Gemm in integers would round them."""
    model = nn.Sequential(Act("lsq", signed=True, bits=2), Linear(16, 8, kind="lsq", bits=2)).eval()
    args = (torch.randn(64, 16),)
    quantized = exporter.quantize(exporter.export(model, args, dynamo=False, portable=True))
    quantized.save(tmp_path / "quantized.onnx")
    for (one,), (other,) in both(tmp_path / "quantized.onnx", model, args, 10):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert dict(exporter.load(tmp_path / "quantized.onnx").named_parameters()).keys() >= {"1.of.bias"}


def test_an_observer_that_still_observes_is_the_reason(dynamo):
    model = nn.Sequential(ao.QuantStub(), nn.Linear(16, 8)).train()
    model.qconfig = ao.get_default_qat_qconfig("x86")
    model, x = ao.prepare_qat(model), torch.randn(4, 16)
    model(x)
    with pytest.raises(exporter.ExportError, match="disable the observers"):
        exporter.quantize(exporter.export(model.eval(), (x,), dynamo=dynamo, portable=True))


def test_bad_input(tmp_path):
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(exporter.PythonopError, match="text.onnx"):
        exporter.quantize(tmp_path / "text.onnx")
    with pytest.raises((exporter.PythonopError, OSError)):
        exporter.quantize(tmp_path / "none.onnx")
    floats = exporter.export(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4),), dynamo=False)
    with pytest.raises(exporter.ExportError, match="way out: train with quantisers"):
        exporter.quantize(floats)
    hidden = exporter.export(nn.Sequential(Act(), Linear(4, 4)), (torch.randn(2, 4),), dynamo=False)
    with pytest.raises(exporter.ExportError, match="portable=True"):
        exporter.quantize(hidden)


def test_a_normalization_in_training_mode_is_the_reason():
    model = nn.Sequential(Act(signed=True), Conv(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Act(), nn.Flatten(), Linear(4 * 36, 3)).train()
    quantized = exporter.quantize(exporter.export(model, image(size=8), dynamo=False, portable=True))
    assert "export in eval mode" in str(quantized)
    assert [bool(each.kernel) for each in quantized.products] == [False, True]


def test_nothing_behind_is_said():
    assert MODELS["nothing behind"].says == BEHIND
