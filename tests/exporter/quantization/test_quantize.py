"""exporter.quantize: which products run in integers, what the file computes beside eager, and what is left alone with its reason."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exporter
from exporter.quantization.products import Product
from exporter.quantization.quantizers import Missed
from exporter.quantization.refused import nothing_in_integers
from symbolics.errors import ArgumentError, ExportError, FormatError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class Ste(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, low, high):
        return torch.clamp(torch.round(x / scale), low, high) * scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None, None


class Act(nn.Module):
    """A quantiser of activations, written in one of the ways that people write it."""

    def __init__(self, how="function", scale=0.04, low=0, high=255):
        super().__init__()
        self.how, self.low, self.high, self.scale = how, low, high, nn.Parameter(torch.tensor(scale))

    def forward(self, x):
        if self.how == "function":
            return Ste.apply(x, self.scale, self.low, self.high)
        if self.how == "fake_quantize":
            return torch.fake_quantize_per_tensor_affine(x, self.scale.detach(), torch.tensor(0, dtype=torch.int32), self.low, self.high)
        q = torch.clamp(torch.round(x / self.scale), self.low, self.high) * self.scale
        return {"detach": lambda: x + (q - x).detach(), "other detach": lambda: q.detach() + x - x.detach(), "operators": lambda: q}[
            self.how
        ]()


class Conv(nn.Conv2d):
    def __init__(self, *args, bits=8, **kwargs):
        super().__init__(*args, **kwargs)
        self.top = 2 ** (bits - 1) - 1
        self.register_buffer("step", self.weight.detach().abs().amax((1, 2, 3), keepdim=True) / self.top)

    def forward(self, x):
        return self._conv_forward(x, Ste.apply(self.weight, self.step, -self.top, self.top), self.bias)


class Linear(nn.Linear):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("step", self.weight.detach().abs().max() / 127)

    def forward(self, x):
        return F.linear(x, Ste.apply(self.weight, self.step, -127, 127), self.bias)


SIGNED = {"low": -128, "high": 127}


def conv_net(how="function", bits=8):
    torch.manual_seed(0)
    net = nn.Sequential(
        Act(how, 0.03, **SIGNED), Conv(3, 8, 3, padding=1, bits=bits), nn.BatchNorm2d(8), nn.ReLU(),
        Act(how), Conv(8, 8, 3, stride=2, groups=4, bits=bits), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        Act(how), nn.Flatten(), Linear(72, 5),
    )  # fmt: skip
    with torch.no_grad():
        for norm in (net[2], net[6]):
            norm.weight.copy_(torch.tensor([1.0, -0.7, 2.0, 0.5, 1.0, 1.5, -1.0, 0.0]))  # negative ones, and one that is off
            norm.bias.uniform_(-0.5, 0.5)
            norm.running_mean.uniform_(-0.2, 0.2)
            norm.running_var.uniform_(0.5, 2)
    return net.eval(), (torch.randn(2, 3, 14, 14),)


def run(model, x):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})


def off(model, quantized, shape, step, times=40):
    """The share of outputs that are off by more than a rounding, and the largest difference in steps of the last activation."""
    proto, shares, worst = quantized.model_proto, [], 0.0
    for seed in range(times):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        gap = np.abs(run(proto, x.numpy())[0] - model(x).detach().numpy())
        shares.append((gap > 1e-3 * step).mean())
        worst = max(worst, float(gap.max()) / step)
    return float(np.mean(shares)), worst


@pytest.mark.parametrize("how", ["function", "fake_quantize", "detach", "other detach", "operators"])
def test_a_conv_net_runs_in_integers(dynamo, how, tmp_path):
    model, args = conv_net(how)
    program = exporter.export(model, args, dynamo=dynamo, portable=True)
    before = program.model_proto.SerializeToString()
    quantized = exporter.quantize(program)
    assert program.model_proto.SerializeToString() == before
    assert [each.kernel for each in quantized.products] == ["QLinearConv", "QLinearConv", "MatMulIntegerToFloat"]
    assert "3 of 3 products run in integers" in str(quantized)
    assert quantized.left == {}
    share, worst = off(model, quantized, (2, 3, 14, 14), 0.04 * 72 * float(model[-1].step) * 127)
    assert share < 0.05 and worst < 0.2
    quantized.save(tmp_path / "integers.onnx")
    onnx.checker.check_model(str(tmp_path / "integers.onnx"), full_check=True)
    types = {t.name: t.data_type for t in onnx.load(tmp_path / "integers.onnx").graph.initializer}
    assert list(types.values()).count(onnx.TensorProto.INT8) >= 3 and onnx.TensorProto.INT32 in types.values()


def test_weights_are_the_models_bit_by_bit():
    model, args = conv_net()
    graph = exporter.quantize(exporter.export(model, args, dynamo=False, portable=True)).model_proto.graph
    held = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    makers = {output: node for node in graph.node for output in node.output}
    product = next(node for node in graph.node if node.op_type == "MatMul")
    levels, scale = (held[name] for name in makers[product.input[1]].input[:2])
    assert np.array_equal(levels.T.astype(np.float32) * scale, Ste.apply(model[-1].weight, model[-1].step, -127, 127).detach().numpy())
    assert scale == model[-1].step.numpy()


@pytest.mark.parametrize("part", [lambda: Linear(8, 8), lambda: Conv(8, 8, 1)], ids=["linear", "convolution"])
def test_sums_that_do_not_saturate(part):
    """session.x64quantprecision makes another zero point of each weight's: one of two weights would be made twice."""
    x = torch.randn(2, 8, 6, 8)
    quantized = exporter.quantize(
        exporter.export(nn.Sequential(Act(), part(), nn.ReLU(), Act(), part(), Act()).eval(), (x,), portable=True)
    )
    assert all(each.kernel for each in quantized.products)
    exact = onnxruntime.SessionOptions()
    exact.add_session_config_entry("session.x64quantprecision", "1")
    found = [
        onnxruntime.InferenceSession(quantized.model_proto.SerializeToString(), options).run(None, {"input": x.numpy()})[0]
        for options in (None, exact)
    ]
    np.testing.assert_array_equal(*found)


def test_four_bits_in_int8():
    model, args = conv_net(bits=4)
    quantized = exporter.quantize(exporter.export(model, args, dynamo=False, portable=True))
    assert [each.bits for each in quantized.products] == [4, 4, 8]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.other, self.inner = Conv(4, 4, 3, padding=1), Conv(4, 4, 1), Act(scale=0.02)
        self.first, self.last, self.between = Act(**SIGNED), Act(scale=0.05), Act(scale=0.05, **SIGNED)

    def forward(self, x):
        x = self.first(x)
        y = self.inner(self.conv(x).relu())
        return self.last((self.between(self.other(y)) + x).relu())


class Attention(nn.Module):
    """Its first quantiser is read by three products, its matrix products by heads are of activations alone."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (Linear(8, 8) for _ in range(4))
        self.x, self.y = Act(scale=0.03, **SIGNED), Act(scale=0.01, **SIGNED)

    def forward(self, x):
        x = self.x(x)
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = (torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v).transpose(1, 2).flatten(-2)
        return self.out(self.y(attended))


def test_a_residual_block():
    model = Residual().eval()
    quantized = exporter.quantize(exporter.export(model, (torch.randn(1, 4, 6, 6),), dynamo=False, portable=True))
    assert [each.kernel for each in quantized.products] == ["QLinearConv", "QLinearConv"]
    share, worst = off(model, quantized, (1, 4, 6, 6), 0.05)
    assert share < 0.02 and worst < 1.01  # one level, where a sum lies on a threshold


def test_linear_layers_of_three_axes(dynamo):
    model = Attention().eval()
    quantized = exporter.quantize(exporter.export(model, (torch.randn(2, 5, 8),), dynamo=dynamo, portable=True))
    kernels = [each.kernel for each in quantized.products]
    assert kernels.count("MatMulIntegerToFloat") == 4
    assert all(each.reason.startswith("no quantiser gives what it takes: it comes of ") for each in quantized.products if not each.kernel)
    share, worst = off(model, quantized, (2, 5, 8), 0.01)
    assert worst < 1.01


def test_a_float_weight_between_quantisers_stays_what_it_is():
    """onnxruntime rounds such a weight without being asked."""
    model = nn.Sequential(Act(scale=0.03, **SIGNED), nn.Conv2d(3, 4, 3), nn.ReLU(), Act(), Conv(4, 4, 3), Act(scale=0.1, **SIGNED)).eval()
    x = torch.randn(1, 3, 9, 9)
    quantized = exporter.quantize(exporter.export(model, (x,), dynamo=False, portable=True))
    assert [bool(each.kernel) for each in quantized.products] == [False, True]
    assert "on no uniform grid" in quantized.products[0].reason
    share, worst = off(model, quantized, (1, 3, 9, 9), 0.1)
    assert share < 0.01 and worst < 1.01


REASONS = {
    "no quantiser behind it": (lambda: nn.Sequential(Act(), Conv(3, 2, 3), Act(), Conv(2, 2, 3)), "no quantiser takes what it gives"),
    "no quantiser before it": (lambda: nn.Sequential(Conv(3, 2, 3), Act(), Conv(2, 2, 3), Act()), "no quantiser gives what it takes"),
    "steps by channels": (
        lambda: nn.Sequential(nn.Conv2d(3, 2, 1), ByChannels(), Conv(2, 2, 1), Act(), Conv(2, 2, 1), Act()),
        "no quantiser gives what it takes",
    ),
    "statistics of a batch": (
        lambda: nn.Sequential(Act(), Conv(3, 2, 3), nn.BatchNorm2d(2).train(), Act(), Conv(2, 2, 3), Act()), "export in eval mode"
    ),
    "a dynamic scale": (
        lambda: nn.Sequential(nn.Conv2d(3, 2, 1), Dynamic(), Conv(2, 2, 1), Act(), Conv(2, 2, 1), Act()), "no quantiser gives what it takes"
    ),
}  # fmt: skip


class ByChannels(nn.Module):
    def forward(self, x):
        scale = torch.tensor([0.1, 0.2]).reshape(2, 1, 1)
        return torch.clamp(torch.round(x / scale), -128, 127) * scale


class Dynamic(nn.Module):
    def forward(self, x):
        scale = x.abs().amax() / 127
        return torch.clamp(torch.round(x / scale), -128, 127) * scale


@pytest.mark.parametrize("name", REASONS)
def test_what_stays_in_float_says_why(name):
    make, reason = REASONS[name]
    model = make().train(name == "statistics of a batch")
    quantized = exporter.quantize(exporter.export(model, (torch.randn(1, 3, 8, 8),), dynamo=False, portable=True))
    assert any(reason in each.reason for each in quantized.products)
    assert reason in str(quantized)
    assert sum(bool(each.kernel) for each in quantized.products) == 1
    if name == "steps by channels":
        assert any("each channel" in why for why in quantized.left.values())
    if name == "a dynamic scale":
        assert any("a step that is computed" in why for why in quantized.left.values())


def test_open_sizes():
    model, (x,) = conv_net("fake_quantize")
    quantized = exporter.quantize(exporter.export(model, (x,), dynamic_shapes=({0: "batch"},), portable=True))
    assert all(each.kernel for each in quantized.products)
    assert run(quantized.model_proto, torch.randn(5, 3, 14, 14).numpy())[0].shape == (5, 5)


def test_a_quantiser_gives_an_output():
    model = nn.Sequential(Act(**SIGNED), Conv(3, 2, 3), Act(scale=0.1, **SIGNED)).eval()
    program = exporter.export(model, (torch.randn(1, 3, 5, 5),), dynamo=False, portable=True)
    quantized = exporter.quantize(program)
    assert [v.name for v in quantized.model.graph.outputs] == [v.name for v in program.model.graph.outputs]
    assert quantized.products[0].kernel == "QLinearConv"


def test_the_file_is_a_module_and_has_a_gradient(tmp_path):
    model, args = conv_net()
    quantized = exporter.quantize(exporter.export(model, args, dynamo=False, portable=True))
    quantized.save(tmp_path / "integers.onnx")
    module = exporter.load(tmp_path / "integers.onnx")
    x = args[0].requires_grad_()
    module(x).sum().backward()
    assert x.grad.abs().sum() > 0
    names = set(module.state_dict())
    assert "11.weight" not in names and "2.num_batches_tracked" in names
    assert exporter.build_gradient_graph(tmp_path / "integers.onnx").graph.outputs


def test_quantised_by_another_tool():
    """QuantizeLinear and DequantizeLinear with int8, also around a weight that is still a float."""
    model = nn.Sequential(Act("fake_quantize", **SIGNED), nn.Linear(6, 4), Act("fake_quantize", 0.1, **SIGNED)).eval()
    torch.nn.utils.parametrize.register_parametrization(model[1], "weight", Act("fake_quantize", 0.01, **SIGNED))
    quantized = exporter.quantize(exporter.export(model.eval(), (torch.randn(3, 6),), dynamo=False).model_proto)
    assert [(each.operator, each.kernel) for each in quantized.products] == [("Gemm", "MatMulIntegerToFloat")]


def test_nothing_to_quantise(tmp_path):
    x = torch.randn(2, 4)
    with pytest.raises(ExportError, match="nothing in the model can run in integers") as told:
        exporter.quantize(exporter.export(nn.Linear(4, 2), (x,), dynamo=False))
    assert "way out: train with quantisers" in str(told.value) and len(str(told.value).splitlines()) <= 6
    opaque = exporter.export(nn.Sequential(Act(), Linear(4, 2)).eval(), (x,), dynamo=False)
    with pytest.raises(ExportError, match="export with portable=True"):
        exporter.quantize(opaque)
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(FormatError):
        exporter.quantize(tmp_path / "text.onnx")
    with pytest.raises((ArgumentError, TypeError)):
        exporter.quantize(3)


class Wider(nn.Module):
    """Its step has more axes than what it divides."""

    def forward(self, x):
        scale = torch.full((1, 1, 1), 0.1)
        return torch.clamp(torch.round(x / scale), -128, 127) * scale


def test_a_step_that_adds_an_axis_is_no_quantiser():
    model = nn.Sequential(Act(**SIGNED), Linear(4, 3), Wider(), nn.Linear(3, 2)).eval()
    quantized = exporter.quantize(exporter.export(model, (x := torch.randn(5, 4),), dynamo=False, portable=True))
    (got,) = run(quantized.model_proto, x.numpy())
    assert got.shape == (1, 5, 2)
    np.testing.assert_allclose(got, model(x).detach().numpy(), atol=1e-5)
    assert len(quantized.activations) == 1


def test_levels_are_compared():
    model, _ = conv_net()
    quantized = exporter.quantize(exporter.export(model, (torch.randn(2, 3, 14, 14),), dynamo=False, portable=True))
    name, drawn = quantized.model.graph.inputs[0].name, np.random.default_rng(0)
    found = quantized.compare(*({name: drawn.standard_normal((2, 3, 14, 14)).astype(np.float32)} for _ in range(30)))
    assert len(found.levels) == 3 and found.runs == 30
    first, *others = found.levels.values()
    assert first == 0 and all(share < 5e-3 for share in others) and max(found.steps.values()) <= 1
    assert list(found.classes.values()) == [0.0]
    assert str(found).count("levels of") == 3
    with pytest.raises(ArgumentError, match="nothing to compare on"):
        quantized.compare()
    # What is compared is the file: another scale in it, and levels differ.
    broken = quantized.model.graph.initializers[f"{quantized.activations[1].name}/scale"]
    broken.const_value = type(broken.const_value)(broken.const_value.numpy() * np.float32(1.5), name=broken.name)
    x = drawn.standard_normal((2, 3, 14, 14)).astype(np.float32)
    assert max(quantized.compare({name: x}).levels.values()) > 0.05


DAMAGED = {
    "a weight without axes": """<ir_version: 9, opset_import: ["": 18]> g (float[2, 2] x) => (y) <float w = {1}> { y = Gemm(x, w) }""",
    "a type that there is not": """<ir_version: 9, opset_import: ["": 18]> g (float[2] x) => (y) { c = Cast<to = 2147483648>(x) y = Cast<to = 1>(c) }""",
    "a function of another opset": """<ir_version: 9, opset_import: ["": 18, "own": 1]> g (float[2] x) => (y) { y = own.f(x) }
        <domain: "own", opset_import: ["": 20]> f (a) => (b) { b = Exp(a) }""",
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("make", [exporter.quantize, exporter.to_qonnx, lambda model: exporter.quantize(model, weights="int4")])
def test_damaged_models_are_errors_of_ours(name, make):
    with pytest.raises((ExportError, FormatError)) as told:
        make(onnx.parser.parse_model(DAMAGED[name]))
    assert len(str(told.value).splitlines()) <= 6


class Convolutions(nn.Sequential):
    """Five products in floats."""

    def __init__(self):
        super().__init__(*(nn.Conv2d(3, 3, 1) for _ in range(5)))


@pytest.mark.parametrize(
    ("half", "way"), [(False, "onnxruntime.quantization.quantize_static"), (True, "way out: export the model in float32")]
)
def test_the_error_of_a_float_model_counts_its_products_and_has_its_way_out(dynamo, half, way):
    model, x = Convolutions().eval(), torch.randn(1, 3, 4, 4)
    with pytest.raises(ExportError) as told:
        exporter.quantize(exporter.export(model.half() if half else model, (x.half() if half else x,), dynamo=dynamo))
    text = str(told.value)
    assert way in text and ", and 4 more: its weight is" in text and len(text.splitlines()) <= 6, text
    assert ("train with quantisers" in text) is not half and "['" not in text
    if dynamo:
        assert " in module 0), and 4 more: its weight" in text


@pytest.mark.parametrize(
    ("layers", "says", "way"),
    [
        (
            lambda: [Act(), Conv(3, 4, 1), nn.Tanh(), Act(**SIGNED), Conv(4, 4, 1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2)],
            [", and 1 more: no quantiser takes what it gives", "its weight is on no uniform grid"],
            "train with quantisers before the weights and directly behind the convolutions (a BatchNorm and a ReLU may stand between)",
        ),
        (
            lambda: [Act(), nn.Flatten(), nn.Sigmoid(), Linear(48, 2), nn.Sigmoid(), Linear(2, 2)],
            ["(node", "no quantiser gives what it takes: it comes of Sigmoid"],
            "train with quantisers before what a product takes",
        ),
        (
            lambda: [nn.Flatten(), Act(high=1023), Linear(48, 2)],
            ["levels: integer kernels take 8 bits"],
            "change the rounding as its reason says",
        ),
    ],
    ids=["behind a convolution", "before a product", "of 10 bits"],
)
def test_the_way_out_of_nothing_follows_from_the_reasons(layers, says, way, dynamo):
    with pytest.raises(ExportError) as told:
        exporter.quantize(exporter.export(nn.Sequential(*layers()).eval(), (torch.rand(2, 3, 4, 4),), dynamo=dynamo, portable=True))
    text = str(told.value)
    assert all(each in text for each in says) and text.splitlines()[-1] == f"  way out: {way}" and len(text.splitlines()) <= 6, text


def test_the_error_of_many_reasons_has_six_lines():
    nodes = [ir.Node("", "MatMul", [None, None], name=f"node{i}") for i in range(9)]
    products = [Product(node, "MatMul", None, [], reason=f"reason {i % 7}") for i, node in enumerate(nodes)]
    lines = str(
        nothing_in_integers(ir.Model(ir.Graph([], [], nodes=nodes), ir_version=10), products, [], [Missed(nodes[0], "another")])
    ).splitlines()
    assert len(lines) == 6 and lines[4] == "  and 5 more reasons" and "node0" in lines[1] and ", and 1 more: reason 0" in lines[1]


def test_the_error_of_a_model_without_products_says_so():
    with pytest.raises(ExportError, match="no convolution and no matrix product"):
        exporter.quantize(exporter.export(nn.Sequential(nn.ReLU(), nn.Tanh()), (torch.randn(2, 3),), dynamo=False))


def test_rounding_models_are_not_sent_to_another_quantisation():
    """It has quantisers, so what onnxruntime does with float models is no way out."""
    with pytest.raises(ExportError, match="way out: train with quantisers") as told:
        exporter.quantize(
            exporter.export(nn.Sequential(Act("fake_quantize", **SIGNED), nn.Linear(4, 2)).eval(), (torch.randn(2, 4),), dynamo=False)
        )
    assert "quantize_static" not in str(told.value)


def test_a_comparison_says_on_what_it_was_made():
    model, names = nn.Sequential(Act(), Linear(4, 2)).eval(), {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}}
    quantized = exporter.quantize(exporter.export(model, (torch.randn(3, 4),), dynamo=False, portable=True, **names))
    one, other = (np.random.default_rng(seed).standard_normal((3 + seed, 4)).astype(np.float32) for seed in range(2))
    found = quantized.compare({"x": one}, {"x": other}, {"x": one.copy()})
    assert (found.runs, found.different, found.shapes) == (3, 2, {"x": ["float32[3, 4]", "float32[4, 4]"]})
    assert str(found).startswith("3 inputs, 2 of them different, beside")
    assert "\n  input x: float32[3, 4], float32[4, 4]\n" in str(found)
    assert str(quantized.compare({"x": one})).startswith("1 input, beside")
    many = quantized.compare(*({"x": np.zeros((size, 4), np.float32)} for size in range(1, 7)))
    assert "float32[4, 4] and 2 more\n" in str(many)


def test_products_in_bodies_are_counted():
    """They stay in float, and were left out of the report."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[2, 2] x, bool c) => (float[2, 2] y)
        <float s = {0.1}, uint8 z = {128}, int8[2, 2] v = {1, -127, 3, 4}, float t = {0.01}, int8 o = {0}, float[2, 2] f = {1, 2, 3, 4}>
        {
            q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  w = DequantizeLinear(v, t, o)
            m = MatMul(d, w)
            y = If(c) <
                then_branch = first () => (float[2, 2] a) { a = MatMul(m, f) },
                else_branch = second () => (float[2, 2] b) { b = Identity(m) }>
        }"""
    )
    quantized = exporter.quantize(model)
    assert [bool(each.kernel) for each in quantized.products] == [True, False]
    assert quantized.products[1].reason.startswith("it is in the body of If")
    assert str(quantized).startswith("1 of 2 products run in integers")
    assert not exporter.quantize(model, weights="int4").products[1].kernel
