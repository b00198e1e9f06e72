"""Fake quantization against eager, in value and gradient: bits, ties, channels, scales that learn, training and inference."""

from __future__ import annotations

import pytest
import torch
import torch.ao.quantization as ao
from torch import nn

import exporter
from symbolics import quirks, torch_private as private

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

#: Ties between levels, the last of a range and the first beyond, far out on both sides.
X = torch.cat([torch.arange(-300, 300) * 0.05 + 0.0125, torch.arange(-20, 20) * 0.1 + 0.05, torch.tensor([0.0, 1e4, -1e4])]).reshape(
    -1, 1
) * torch.ones(3)
SCALES, ZEROS = torch.tensor([0.1, 0.03, 0.2]), torch.tensor([0, 3, 1], dtype=torch.int32)

CALLS = {
    "4 bits": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7),
    "4 bits, unsigned": lambda x: torch.fake_quantize_per_tensor_affine(x, scale=0.1, zero_point=5, quant_min=0, quant_max=15),
    "7 bits": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.05, 64, 0, 127),
    "8 bits": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127),
    "tensors": lambda x: torch.fake_quantize_per_tensor_affine(x, torch.tensor([0.05]), torch.tensor([3]), -127, 127),
    "channels, 3 bits": lambda x: torch.fake_quantize_per_channel_affine(x, SCALES, ZEROS, 1, 0, 7),
    "channels, 8 bits": lambda x: torch.fake_quantize_per_channel_affine(x, SCALES, ZEROS, 1, -128, 127),
    "mask": lambda x: torch.ops.aten.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 0, -8, 7)[0],
    "masks of channels": lambda x: torch.ops.aten.fake_quantize_per_channel_affine_cachemask(x, SCALES, ZEROS, 1, -8, 7)[0],
}


class Net(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call, self.w = call, nn.Parameter(torch.tensor([1.0, 0.5, 2.0]))  # exact: a tie stays one

    def forward(self, x):
        return self.call(x * self.w)


class Learns(nn.Module):
    def __init__(self, per_channel):
        super().__init__()
        self.scale = nn.Parameter(SCALES.clone() if per_channel else torch.tensor([0.1]))
        self.zero = nn.Parameter(torch.tensor([0.0, 2.4, -1.0]) if per_channel else torch.tensor([1.2]))

    def forward(self, x):
        if len(self.scale) > 1:
            return private.private_quantizers()[1](x, self.scale, self.zero, 1, -8, 7, 0.5)
        return private.private_quantizers()[0](x, self.scale, self.zero, -8, 7, 0.5)


def assert_as_eager(model, x, *, dynamo, share=0.0, tolerance=0.0, of_weights=1e-4):
    """Values and gradients; ``share`` of the elements may be on the other side of a tie."""
    module = exporter.load(exporter.export(model, (x,), dynamo=dynamo), allow=[Steep])
    results = []
    for side in (model, module):
        given = x.clone().requires_grad_()
        side.zero_grad()
        y = side(given)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
        results.append((y.detach(), given.grad, {name: p.grad.clone() for name, p in side.named_parameters()}))
    (y, dx, dw), (y_, dx_, dw_) = results
    for one, two in ((y, y_), (dx, dx_)):
        assert float(((one - two).abs() > tolerance).double().mean()) <= share
    if not share:
        torch.testing.assert_close(dw_, dw, rtol=of_weights, atol=1e-3)
    assert all(grad.any() for grad in dw_.values())


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_in_training(call, dynamo):
    assert_as_eager(Net(call).train(), X, dynamo=dynamo)


@pytest.mark.parametrize("name", ["4 bits", "7 bits", "channels, 8 bits"])
def test_in_inference(name, dynamo):
    """8 bits and 7 stay what integer kernels are made for, which divides by the scale: ties may differ."""
    model = Net(CALLS[name]).eval()
    kept = {node.op_type for node in exporter.export(model, (X,), dynamo=dynamo).model.graph} >= {"QuantizeLinear", "DequantizeLinear"}
    assert kept == (name != "4 bits")
    assert_as_eager(model, X, dynamo=dynamo, share=0.2 if kept else 0.0, tolerance=1e-6)


@pytest.mark.parametrize("per_channel", [False, True])
def test_scales_that_learn(per_channel, dynamo):
    assert_as_eager(Learns(per_channel), X, dynamo=dynamo, of_weights=3e-6)


class Observes(nn.Module):
    def __init__(self, per_channel, observes, quantizes):
        super().__init__()
        self.w, shape, self.per_channel = nn.Parameter(torch.tensor([1.0, 0.5, 2.0])), 3 if per_channel else 1, per_channel
        start = (float(observes), float(quantizes)), [torch.full((shape,), v) for v in (float("inf"), -float("inf"), 0.05)]
        names = ("observes", "quantizes", "low", "high", "scale", "zero")
        for name, value in zip(names, [*(torch.tensor([v]) for v in start[0]), *start[1], torch.zeros(shape, dtype=torch.int32)]):
            self.register_buffer(name, value)

    def forward(self, x):
        state = (self.observes, self.quantizes, self.low, self.high, self.scale, self.zero)
        return torch.fused_moving_avg_obs_fake_quant((x * self.w).mT, *state, 0.3, -8, 7, 0, self.per_channel, not self.per_channel).mT


@pytest.mark.parametrize(("per_channel", "observes", "quantizes"), [(False, 1, 1), (True, 1, 1), (False, 0, 1), (True, 1, 0)])
def test_observers_move_their_statistics(per_channel, observes, quantizes, dynamo):
    model = Observes(per_channel, observes, quantizes).train()
    module = exporter.load(exporter.export(model, (X,), dynamo=dynamo)).train()
    for x in (X.clamp(-3, 5), X.clamp(-0.1, 2), X.clamp(0.5, 1)):
        found = []
        for side in (model, module):
            given = x.clone().requires_grad_()
            side.zero_grad()
            y = side(given)
            y.sin().sum().backward()
            found.append([y.detach(), given.grad, *(p.grad for p in side.parameters()), *(b.clone() for b in side.buffers())])
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_parameters_of_ranges_are_torchs():
    """Tiny, empty and one-sided ranges, and ranges of levels that zero does not halve."""
    drawn = torch.Generator().manual_seed(0)
    for number in range(600):
        low, high = [(0, 255), (-128, 127), (-8, 7), (0, 15), (-127, 127), (-3, 9)][number % 6]
        x = torch.randn(5, generator=drawn) * 10 ** (12 * torch.rand((), generator=drawn) - 8)
        x = [x, x.abs(), -x.abs(), x * 0, x * 1e-35][number % 5]
        rows = []
        for function in (torch.fused_moving_avg_obs_fake_quant, quirks.REWRITES[torch.fused_moving_avg_obs_fake_quant]):
            state = [
                *(torch.ones(1) for _ in "of"),
                *(torch.tensor([v * float("inf")]) for v in (1, -1)),
                torch.ones(1),
                torch.zeros(1, dtype=torch.int32),
            ]
            args = (x, *state, 0.01, low, high, -1, False, bool(number % 2))
            rows.append([function(*args) if not rows else function(None, args, {}), *state])
        assert all(map(torch.equal, *rows)), (x, low, high, rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_types(dtype):
    assert_as_eager(Net(CALLS["4 bits"]).to(dtype), X.clamp(-10, 10).to(dtype), dynamo=True, of_weights=1e-2)


class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


@pytest.mark.parametrize("name", ["8 bits", "7 bits"])
def test_a_function_behind_a_quantiser_is_reached_by_gradients(dynamo, name):
    """In eval mode the levels between QuantizeLinear and DequantizeLinear are integers: a gradient goes through all the same."""
    model = Net(lambda x: CALLS[name](Steep.apply(x))).eval()
    program = exporter.export(model, (X,), dynamo=dynamo)
    assert {"PythonOp", "QuantizeLinear"} <= {node.op_type for node in program.model.graph}
    assert_as_eager(model, X + 0.003, dynamo=dynamo, tolerance=1e-4)


class Twice(nn.Module):
    """A quantiser under two names, as torch.ao's FX mode has them behind a Concat or a pool."""

    def __init__(self, quantizer):
        super().__init__()
        self.w, self.one, self.other = nn.Parameter(torch.tensor([1.0, 0.5, 2.0])), quantizer, quantizer

    def forward(self, x):
        return self.other(self.one(x * self.w) * 0.7)


@pytest.mark.parametrize("make", [lambda: ao.FakeQuantize(), lambda: ao.default_fused_act_fake_quant()], ids=["switches", "fused"])
@pytest.mark.parametrize("on", [True, False])
def test_switches_are_known(make, on, dynamo):
    """Of FakeQuantize, and of what no longer observes: nothing of it changes any more."""
    quantizer = make()
    model = Twice(quantizer)
    for _ in range(3):
        model(X)
    quantizer.apply(ao.disable_observer)
    quantizer.apply(ao.enable_fake_quant if on else ao.disable_fake_quant)
    model(X)
    program = exporter.export(model, (X,), dynamo=dynamo)
    assert len(program.model.graph.outputs) == 1
    assert_as_eager(model, X, dynamo=dynamo, tolerance=1e-6)
    assert "fake_quant_enabled" not in quantizer.__dict__ and "forward" not in quantizer.__dict__
    assert {"one.scale", "one.fake_quant_enabled"} <= exporter.load(program).state_dict().keys()


def test_a_graph_module_is_captured_as_any_module(dynamo):
    """torch.export would run it node by node, past all that an export looks at."""
    model = torch.fx.symbolic_trace(Net(CALLS["4 bits"]))
    assert isinstance(model, torch.fx.GraphModule)
    assert_as_eager(model.train(), X, dynamo=dynamo)
    assert isinstance(model, torch.fx.GraphModule) and model.code


@pytest.mark.parametrize("name", ["8 bits", "tensors", "channels, 8 bits"])
def test_an_open_axis(dynamo, name):
    model = Net(CALLS[name]).eval()
    program = exporter.export(model, (X,), dynamo=dynamo, dynamic_shapes=({0: "batch"},))
    x = X[:5] + 0.003
    torch.testing.assert_close(exporter.load(program)(x), model(x))
