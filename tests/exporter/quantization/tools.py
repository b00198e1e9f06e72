"""Models as the tools of quantisation-aware training leave them, trained for three steps."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.ao.quantization as ao
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import quantize_fx

from tests.exporter.quantization.models import Case

__all__ = ["BREVITAS", "PT2E", "TORCHAO", "TORCH_AO"]


class Stubs(nn.Module):
    """As torch.ao's eager mode wants a model."""

    def __init__(self):
        super().__init__()
        self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
        self.c1, self.b1, self.r1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.c2, self.b2, self.r2 = nn.Conv2d(8, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.c3, self.r3 = nn.Conv2d(8, 16, 1), nn.ReLU()
        self.f1, self.r4, self.f2 = nn.Linear(16 * 9, 32), nn.ReLU(), nn.Linear(32, 10)

    def forward(self, x):
        x = self.r1(self.b1(self.c1(self.quant(x))))
        x = self.r3(self.c3(self.r2(self.b2(self.c2(x)))))
        return self.dequant(self.f2(self.r4(self.f1(torch.flatten(x, 1)))))


class Plain(nn.Module):
    """A net with a way around, a Concat and pools."""

    def __init__(self):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.c2, self.b2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.c3, self.b3 = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16)
        self.pool, self.mean, self.f = nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.b1(self.c1(x)))
        y = F.relu(x + self.b2(self.c2(x)))
        x = self.pool(F.relu6(self.b3(self.c3(torch.cat([x, y], 1)))))
        return self.f(torch.flatten(self.mean(x), 1))


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))


def fitted(model: nn.Module, x: Tensor, disable: Callable[[nn.Module], None] = ao.disable_observer) -> tuple[nn.Module, tuple[Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        y = model(torch.randn_like(x))
        y.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.apply(disable)
    return model, (x,)


def image():
    return torch.randn(2, 3, 8, 8)


def eager(config, fuse=True):
    model = Stubs().train()
    if fuse:
        model = ao.fuse_modules_qat(model, [["c1", "b1", "r1"], ["c2", "b2", "r2"], ["c3", "r3"], ["f1", "r4"]])
    model.qconfig = ao.get_default_qat_qconfig(config) if isinstance(config, str) else config
    model, args = fitted(ao.prepare_qat(model), image())
    return model.eval(), args


def plain(bits):
    """FakeQuantize, and observers that are modules of their own."""
    return ao.QConfig(
        activation=ao.FakeQuantize.with_args(
            observer=ao.MovingAverageMinMaxObserver, quant_min=0, quant_max=2**bits - 1, dtype=torch.quint8
        ),
        weight=ao.FakeQuantize.with_args(
            observer=ao.MovingAveragePerChannelMinMaxObserver, quant_min=-(2 ** (bits - 1)), quant_max=2 ** (bits - 1) - 1,
            dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=0,
        ),
    )  # fmt: skip


def fx(backend, model, x):
    model, args = fitted(quantize_fx.prepare_qat_fx(model.train(), ao.get_default_qat_qconfig_mapping(backend), (x,)), x)
    return model.eval(), args


def pt2e(model, x):
    module = importlib.import_module("torchao.quantization.pt2e")
    prepare = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e").prepare_qat_pt2e
    x86 = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
    model, args = fitted(prepare(torch.export.export(model.train(), (x,)).module(), quantizer), x, module.disable_observer)
    module.move_exported_model_to_eval(model)
    return model, args


def torchao_qat(activation, weight, **options):
    """Linear layers with torchao's fake quantisers in their midst."""
    qat, api = importlib.import_module("torchao.quantization.qat"), importlib.import_module("torchao.quantization")
    config = qat.QATConfig(
        activation_config=qat.IntxFakeQuantizeConfig(torch.int8, activation, is_symmetric=False) if activation else None,
        weight_config=qat.IntxFakeQuantizeConfig(weight, **options), step="prepare",
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(128, 64, bias=False), nn.ReLU(), nn.Linear(64, 32))
    api.quantize_(model, config)
    model, args = fitted(model.train(), torch.randn(4, 128), lambda _: None)
    return model.eval(), args


def brevitas_net(weights, bits):
    qnn, quant = importlib.import_module("brevitas.nn"), importlib.import_module("brevitas.quant")
    given = {"weight_quant": getattr(quant, weights), "weight_bit_width": bits}
    model = nn.Sequential(
        qnn.QuantIdentity(act_quant=quant.Int8ActPerTensorFloat),
        qnn.QuantConv2d(3, 8, 3, padding=1, bias=True, **given), nn.BatchNorm2d(8), qnn.QuantReLU(bit_width=bits),
        qnn.QuantConv2d(8, 8, 3, stride=2, bias=False, **given), nn.BatchNorm2d(8), qnn.QuantReLU(bit_width=bits),
        nn.MaxPool2d(2), nn.Flatten(), qnn.QuantLinear(8, 10, bias=True, **given),
    )  # fmt: skip
    model, args = fitted(model.train(), image(), lambda _: None)
    return model.eval(), args


def brevitas_bias(bias):
    """Values that carry their scales, by which biases are rounded."""
    qnn, quant = importlib.import_module("brevitas.nn"), importlib.import_module("brevitas.quant")
    given = {"weight_quant": quant.Int8WeightPerChannelFloat, "bias": True, "bias_quant": getattr(quant, bias)}
    model = nn.Sequential(
        qnn.QuantIdentity(act_quant=quant.Int8ActPerTensorFloat, return_quant_tensor=True), qnn.QuantLinear(16, 32, **given),
        qnn.QuantReLU(return_quant_tensor=True), qnn.QuantLinear(32, 8, **given),
    )  # fmt: skip
    model, args = fitted(model.train(), torch.randn(4, 16), lambda _: None)
    return model.eval(), args


TORCH_AO: dict[str, Case] = {
    **{f"eager {config}": Case(lambda config=config: eager(config), 5, 5) for config in ("fbgemm", "x86", "qnnpack")},
    "eager symmetric": Case(lambda: eager(ao.default_symmetric_qnnpack_qat_qconfig), 5, 5),
    "eager FakeQuantize": Case(lambda: eager(plain(8)), 5, 5),
    "eager not fused": Case(lambda: eager(plain(8), fuse=False), 5, 5),
    "eager 4 bits": Case(lambda: eager(plain(4)), 5, 5),
    "fx x86": Case(lambda: fx("x86", Plain(), image()), 4, 4),
    "fx qnnpack": Case(lambda: fx("qnnpack", Plain(), image()), 4, 4),
    "fx mlp": Case(lambda: fx("x86", mlp(), torch.randn(4, 16)), 3, 3),
}
PT2E: dict[str, Case] = {
    "mlp": Case(lambda: pt2e(mlp(), torch.randn(4, 16)), 3, 3),
    "conv": Case(
        lambda: pt2e(Plain(), image()), 3, 4, "no quantiser takes what it gives"
    ),  # a sum goes into one kernel with its convolution there
}
#: With weights of 4 bits, and what they are off by.
TORCHAO: dict[str, tuple[Callable[[], Any], float]] = {
    "groups of 4 bits": (lambda: torchao_qat(None, torch.int4, group_size=32), 0.0),
    "channels of 4 bits": (lambda: torchao_qat(None, torch.int4, granularity="per_channel"), 0.0),
    "groups of 4 bits, tokens of 8": (lambda: torchao_qat("per_token", torch.int4, group_size=32), 0.0),
    "channels of 8 bits": (lambda: torchao_qat(None, torch.int8, granularity="per_channel"), 0.1),
}
BREVITAS: dict[str, Case] = {
    "tensor": Case(lambda: brevitas_net("Int8WeightPerTensorFloat", 8), 3, 3),
    "channels": Case(lambda: brevitas_net("Int8WeightPerChannelFloat", 8), 3, 3),
    "4 bits": Case(lambda: brevitas_net("Int8WeightPerChannelFloat", 4), 3, 3),
    "bias in int32": Case(lambda: brevitas_bias("Int32Bias"), 2, 2),
    "bias in int8": Case(lambda: brevitas_bias("Int8Bias"), 2, 2),
}
