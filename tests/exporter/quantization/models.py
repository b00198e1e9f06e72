"""Fake-quantised models: what integers have to come of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exporter.quantization.quantizers import Act, Conv, ConvT, Linear, fake

__all__ = ["MODELS", "Case", "trained"]


@dataclass
class Case:
    """A model and what it takes.

    Attributes:
        make: () -> the model and its inputs.
        integers: How many of its products run in integers.
        products: How many it has.
        says: What the report says of the others.
        options: What the export takes.
    """

    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
    integers: int
    products: int
    says: str = ""
    options: dict[str, Any] | None = None


def trained(case: Case) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model of a case in eval mode, its batch normalizations with statistics of their own."""
    torch.manual_seed(0)
    model, args = case.make()
    draw = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            with torch.no_grad():
                for tensor, low, high in ((module.running_mean, -0.3, 0.3), (module.running_var, 0.5, 1.5)):
                    tensor.copy_(torch.rand(tensor.shape, generator=draw) * (high - low) + low)
                module.weight.mul_(torch.rand(module.weight.shape, generator=draw) + 0.5)
                module.bias.copy_(torch.rand(module.bias.shape, generator=draw) - 0.5)
    return model.eval(), args


def image(channels=3, size=16, batch=2):
    return (torch.randn(batch, channels, size, size),)


def rows(features=32, batch=4):
    return (torch.randn(batch, features),)


class Of(nn.Module):
    """Modules by names, and a forward that takes them."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.parts, self.call = nn.ModuleDict(modules), forward

    def forward(self, *args):
        return self.call(self.parts, *args)


def convnet(kind="ste", activation=None, **options):
    def act(**of):
        return Act(activation or kind, bits=options.get("bits", 8), **of)

    def conv(*sizes, **of):
        return Conv(*sizes, kind=kind, **options, **of)

    return nn.Sequential(
        act(signed=True), conv(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        act(), conv(16, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        act(), conv(16, 16, 3, groups=16, padding=1), nn.BatchNorm2d(16), nn.ReLU6(),
        act(), nn.Flatten(), Linear(16 * 9, 10, kind=kind, **options),
    )  # fmt: skip


def mlp(kind="ste", activation=None, **options):
    def act(**of):
        return Act(activation or kind, **of)

    return nn.Sequential(
        act(signed=True), Linear(32, 64, kind=kind, **options), nn.ReLU(),
        act(), Linear(64, 64, kind=kind, **options), nn.GELU(),
        act(signed=True), Linear(64, 10, kind=kind, **options),
    )  # fmt: skip


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, kind):
        super().__init__()
        self.c1, self.c2 = (Conv(8, 8, 3, padding=1, kind=kind) for _ in range(2))
        self.b1, self.b2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.a0, self.a1, self.a2, self.a3 = Act(kind), Act(kind), Act(kind, signed=True), Act(kind)

    def forward(self, x):
        x = self.a0(x)
        y = self.a2(self.b2(self.c2(self.a1(F.relu(self.b1(self.c1(x)))))))
        return self.a3(F.relu(y + x))


class Transformer(nn.Module):
    """A layer of one; ``whole`` quantises what attention multiplies, too."""

    def __init__(self, kind, whole=False, width=32, heads=4):
        super().__init__()
        self.heads, self.whole = heads, whole
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (Linear(width, width, kind=kind) for _ in range(4))
        self.f1, self.f2 = Linear(width, 2 * width, kind=kind), Linear(2 * width, width, kind=kind)
        self.acts = nn.ModuleList(Act(kind, signed=True) for _ in range(7))
        self.shares = Act(kind, step=1 / 255)

    def forward(self, x):
        batch, length, width = x.shape
        y = self.acts[0](self.n1(x))
        q, k, v = (f(y).reshape(batch, length, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.whole:
            q, k, v = self.acts[4](q), self.acts[5](k), self.acts[6](v)
        shares = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(width // self.heads), -1)
        y = ((self.shares(shares) if self.whole else shares) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.o(self.acts[1](y))
        return x + self.f2(self.acts[3](F.gelu(self.f1(self.acts[2](self.n2(x))))))


def two_branches():
    parts = {f"a{i}": Act(signed=True) for i in range(3)} | {"c0": Conv(3, 8, 3), "c1": Conv(3, 8, 3), "c2": Conv(16, 8, 3), "a3": Act()}

    def forward(m, x):
        x = m["a0"](x)
        return m["a3"](F.relu(m["c2"](torch.cat([m["a1"](m["c0"](x)), m["a2"](m["c1"](x))], 1))))

    return Of(forward, **parts), image()


def several_readers():
    def forward(m, x):
        x = m["a"](x)
        return m["q"](x), m["k"](x), m["v"](x).relu()

    return Of(forward, a=Act(signed=True), q=Linear(32, 16), k=Linear(32, 16), v=Linear(32, 16, bias=False)), rows()


def tied():
    def forward(m, x):
        return m["f"](m["a1"](m["f"](m["a0"](x))))

    return Of(forward, f=Linear(32, 32), a0=Act(signed=True), a1=Act(signed=True)), rows()


def tied_embedding():
    """A table of words that is the weight of the last layer, too."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.a = Linear(16, 50, bias=False), Act(signed=True)

        def forward(self, words):
            return self.head(self.a(F.embedding(words, self.head.weight).mean(1)))

    return Words(), (torch.randint(0, 50, (3, 7)),)


def beside_lstm():
    def forward(m, x):
        y, _ = m["lstm"](m["a0"](x))
        return m["f"](m["a1"](y))

    return Of(forward, lstm=nn.LSTM(16, 24, batch_first=True), f=Linear(24, 8), a0=Act(signed=True), a1=Act(signed=True)), (
        torch.randn(2, 5, 16),
    )


class Recurrent(nn.Module):
    """A layer of nn.LSTM or nn.GRU with rounded weights and inputs, as people parametrize it; a linear layer on what it gives."""

    def __init__(self, of):
        super().__init__()
        self.layer, self.a0, self.a1, self.f = of(16, 24, batch_first=True), Act(signed=True), Act(signed=True, step=1 / 127), Linear(24, 8)
        for name in ("weight_ih_l0", "weight_hh_l0"):
            nn.utils.parametrize.register_parametrization(self.layer, name, RoundedRows())

    def forward(self, x):
        return self.f(self.a1(self.layer(self.a0(x))[0]))


class RoundedRows(nn.Module):
    def forward(self, weight):
        return fake(weight, weight.detach().abs().amax(1, keepdim=True) / 127, -127, 127)


class CellByHand(nn.Module):
    """An LSTM's cell of linear layers, four steps of it: what it multiplies is rounded in each."""

    def __init__(self):
        super().__init__()
        self.x, self.h, self.f = Linear(8, 64), Linear(16, 64, bias=False), Linear(16, 4)
        self.a0, self.a1 = Act(signed=True), Act(signed=True, step=1 / 127)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], 16)
        for step in range(4):
            i, f, g, o = (self.x(self.a0(x[:, step])) + self.h(self.a1(h))).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.f(self.a1(h))


class Inverted(nn.Module):
    """MobileNet's block: wide, by channels, narrow, and a way around."""

    def __init__(self, inside, wide, outside, stride):
        super().__init__()
        self.around = stride == 1 and inside == outside
        self.parts = nn.Sequential(
            Conv(inside, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(), Act(step=6 / 255),
            Conv(wide, wide, 3, stride=stride, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(), Act(step=6 / 255),
            Conv(wide, outside, 1, bias=False), nn.BatchNorm2d(outside), Act(signed=True),
        )  # fmt: skip
        self.last = Act(signed=True)

    def forward(self, x):
        return self.last(x + self.parts(x)) if self.around else self.parts(x)


def depthwise():
    return nn.Sequential(Act(signed=True), Inverted(8, 24, 8, 1), Inverted(8, 24, 12, 2), Inverted(12, 24, 12, 1)), image(8)


class Detector(nn.Module):
    """Classes and boxes at two scales, joined as SSD joins them."""

    def __init__(self):
        super().__init__()
        self.a0, self.body, self.down = Act(signed=True), Conv(3, 8, 3, padding=1), Conv(8, 8, 3, stride=2, padding=1)
        self.a1, self.a2 = Act(), Act()
        self.classes, self.boxes = (nn.ModuleList(Conv(8, n, 3, padding=1) for _ in range(2)) for n in (3 * 5, 3 * 4))
        self.outs = nn.ModuleList(Act(signed=True) for _ in range(2))

    def forward(self, x):
        one = self.a1(F.relu(self.body(self.a0(x))))
        levels = one, self.a2(F.relu(self.down(one)))

        def joined(heads, act, size):
            return torch.cat(
                [act(head(y)).permute(0, 2, 3, 1).reshape(x.shape[0], -1, size) for head, y in zip(heads, levels, strict=True)], 1
            )

        return torch.sigmoid(joined(self.classes, self.outs[0], 5)), joined(self.boxes, self.outs[1], 4)


def at_outputs():
    """Quantisers right at outputs, one of which a product reads."""

    def forward(m, x):
        x = m["a0"](x)
        y = m["a1"](m["c"](x).relu())
        return y, m["a2"](m["f"](y.flatten(1))), x

    return Of(forward, a0=Act(signed=True), c=Conv(3, 4, 3), a1=Act(), f=Linear(4 * 36, 5), a2=Act(signed=True)), image(size=8)


def image_of(*makers, channels=3, size=16):
    return lambda: (nn.Sequential(*(make() for make in makers)), image(channels, size))


def rows_of(*makers, features=32):
    return lambda: (nn.Sequential(*(make() for make in makers)), rows(features))


class Asymmetric(nn.Linear):
    """A weight with a zero point of its own."""

    def forward(self, x):
        low, high = -0.21, 0.18
        s = (high - low) / 255
        return F.linear(x, torch.fake_quantize_per_tensor_affine(self.weight, s, round(-low / s), 0, 255), self.bias)


class Dorefa(nn.Linear):
    """DoReFa's weights: an even number of levels, 0.0 in the middle between two."""

    bits = 8

    def forward(self, x):
        n = 2**self.bits - 1
        w = torch.tanh(self.weight)
        w = w / (2 * w.abs().max()) + 0.5
        return F.linear(x, 2 * (w + ((w * n).round() / n - w).detach()) - 1, self.bias)


class Dorefa4(Dorefa):
    bits = 4


def matmul():
    """A product written as one, on three axes."""

    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Act(signed=True), Act(signed=True)
            self.w, self.bias = nn.Parameter(torch.randn(16, 24) * 0.1), nn.Parameter(torch.randn(24) * 0.1)
            self.s = nn.Parameter(torch.tensor(0.003))

        def forward(self, x):
            return torch.matmul(self.a(x), fake(self.w, self.s, -127, 127)) + self.bias

    return Products(), (torch.randn(2, 5, 16),)


def float_weight():
    """A convolution and a linear layer with float weights between quantisers."""
    return nn.Sequential(
        Act(signed=True), Conv(3, 8, 3), nn.ReLU(), Act(), nn.Conv2d(8, 8, 3), nn.ReLU(), Act(),
        nn.Flatten(), nn.Linear(8 * 144, 16), nn.ReLU(), Act(), Linear(16, 10),
    ), image()  # fmt: skip


BEHIND = "no quantiser takes what it gives"
MODELS: dict[str, Case] = {
    **{f"conv {kind}": Case(lambda kind=kind: (convnet(kind), image()), 4, 4) for kind in ("ste", "lsq", "detach", "fake")},
    **{
        f"mlp {kind}": Case(lambda kind=kind: (mlp(kind), rows()), 3, 3)
        for kind in ("ste", "lsq", "lsq function", "grad scale", "detach", "detach steps", "floor", "tensors", "where", "numbers", "fake")
    },
    **{
        f"mlp, activations {kind}": Case(lambda kind=kind: (mlp("ste", kind), rows()), integers, 3, says)
        for kind, integers, says in (
            ("asymmetric", 3, ""),
            ("zero inside", 3, ""),
            ("lsq+", 3, ""),
            ("lsq+ free", 0, "0.0 is not one of its levels"),
            ("dynamic", 0, "computed"),
            ("per token", 0, "computed"),
            ("pact", 3, ""),
            ("never cut", 0, "no last level"),
        )
    },
    **{f"conv {bits} bits": Case(lambda bits=bits: (convnet("lsq", bits=bits), image()), 4, 4) for bits in (2, 3, 4, 6)},
    "narrow range": Case(rows_of(lambda: Act(signed=True, narrow=True), lambda: Linear(32, 8)), 1, 1),
    "7 bits": Case(rows_of(lambda: Act(bits=7), lambda: Linear(32, 8)), 1, 1),
    "whole weights": Case(lambda: (convnet("ste", channels=False), image()), 4, 4),
    "asymmetric weight": Case(rows_of(lambda: Act(signed=True), lambda: Asymmetric(32, 8)), 1, 1),
    "dorefa": Case(rows_of(lambda: Act(signed=True), lambda: Dorefa(32, 8), nn.ReLU, Act, lambda: Linear(8, 8)), 1, 2, "0.0"),
    "dorefa 4 bits": Case(rows_of(lambda: Act(signed=True), lambda: Dorefa4(32, 8), nn.ReLU, Act, lambda: Linear(8, 8)), 1, 2, "0.0"),
    "residual": Case(lambda: (nn.Sequential(Block("ste"), Block("lsq")), image(8, 8)), 4, 4),
    "two branches": Case(two_branches, 3, 3),
    "transformer": Case(lambda: (Transformer("lsq"), (torch.randn(2, 5, 32),)), 6, 8, "no quantiser gives what it takes"),
    "transformer, whole": Case(lambda: (Transformer("ste", True), (torch.randn(2, 5, 32),)), 8, 8),
    "several readers": Case(several_readers, 3, 3),
    "tied": Case(tied, 2, 2),
    "tied embedding": Case(tied_embedding, 1, 1),
    "beside lstm": Case(beside_lstm, 1, 2, "LSTM"),
    "at outputs": Case(at_outputs, 2, 2),
    "lstm": Case(lambda: (Recurrent(nn.LSTM), (torch.randn(2, 5, 16),)), 1, 2, "onnxruntime's CPU has no integer kernel for LSTM"),
    "gru": Case(lambda: (Recurrent(nn.GRU), (torch.randn(2, 5, 16),)), 1, 2, "onnxruntime's CPU has no integer kernel for GRU"),
    "lstm by hand": Case(lambda: (CellByHand(), (torch.randn(3, 4, 8),)), 8, 9, "it is a constant, and the first operand"),
    "depthwise": Case(depthwise, 9, 9),
    "detector": Case(lambda: (Detector(), image(3, 8)), 6, 6),
    "3-D": Case(lambda: (nn.Sequential(Act(signed=True), Linear(16, 24), nn.ReLU(), Act(), Linear(24, 8, bias=False)), (torch.randn(2, 5, 16),)), 2, 2),
    "matmul": Case(matmul, 1, 1),
    "conv1d": Case(
        lambda: (nn.Sequential(Act(signed=True), Conv(3, 8, 5, of=nn.Conv1d), nn.BatchNorm1d(8), nn.ReLU(), Act(), Conv(8, 8, 3, of=nn.Conv1d, bias=False), nn.ReLU(), Act()), (torch.randn(2, 3, 20),)), 2, 2
    ),
    "grouped": Case(
        image_of(lambda: Act(signed=True), lambda: Conv(4, 8, 3, groups=2), nn.ReLU, Act, lambda: Conv(8, 8, 3, groups=8, bias=False), nn.ReLU, Act, lambda: Conv(8, 4, 1), nn.ReLU, Act, channels=4), 3, 3
    ),
    "transposed": Case(image_of(lambda: Act(signed=True), lambda: Conv(3, 4, 3), nn.ReLU, Act, lambda: ConvT(4, 3, 2, stride=2), nn.ReLU, Act), 1, 2, "ConvTranspose"),
    "average": Case(
        image_of(lambda: Act(signed=True), lambda: Conv(3, 8, 3), nn.ReLU, Act, lambda: nn.AvgPool2d(2), Act, lambda: Conv(8, 8, 3), nn.ReLU, Act, lambda: nn.AdaptiveAvgPool2d(1), nn.Flatten, lambda: Linear(8, 5)),
        2, 3, "no quantiser gives what it takes",
    ),
    "float weight": Case(float_weight, 2, 4, "grid"),
    "nothing behind": Case(image_of(lambda: Act(signed=True), lambda: Conv(3, 8, 3), nn.ReLU, Act, lambda: Conv(8, 8, 3), nn.Sigmoid), 1, 2, BEHIND),
    "open batch": Case(lambda: (convnet("lsq"), image()), 4, 4, options={"dynamic_shapes": ({0: "batch"},)}),
    "open everywhere": Case(lambda: (Transformer("lsq"), (torch.randn(2, 5, 32),)), 6, 8, "no quantiser", {"dynamic_shapes": ({0: "batch", 1: "length"},)}),
    **{f"opset {n}": Case(lambda: (convnet("lsq"), image()), 4, 4, options={"opset_version": n}) for n in (18, 19, 20, 21, 22, 23)},
    "negative gains": Case(lambda: (negative(), image()), 4, 4),
    "float16": Case(lambda: (mlp("ste").half(), tuple(x.half() for x in rows())), 0, 3, "float16"),
}  # fmt: skip


def negative():
    model = convnet("ste")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight[::3] *= -1
                module.weight[1] = 0
    return model
