"""The models that the training benchmarks run, each with a batch, a loss and targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["MODELS", "Sample"]


@dataclass(frozen=True)
class Sample:
    """A model in train mode, its arguments, its loss and the targets of that."""

    model: nn.Module
    args: tuple[torch.Tensor, ...]
    loss: Callable[..., torch.Tensor]
    targets: tuple[torch.Tensor, ...]


class Gelu(torch.autograd.Function):
    """GELU with a backward of its own, as fused kernels have it: one saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.gelu_backward(g, x)


class _CustomGelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Gelu.apply(x)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.001

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 1.001


class _Gpt(nn.Module):
    def __init__(self, activation: Callable[[], nn.Module] | None) -> None:
        super().__init__()
        import transformers

        config = transformers.GPT2Config(
            vocab_size=1024, n_positions=1024, n_embd=256, n_layer=4, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        self.inner = transformers.GPT2LMHeadModel(config)
        if activation is not None:
            for block in self.inner.transformer.h:
                block.mlp.act = activation()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=ids, use_cache=False).logits


def _next_token(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gpt(batch: int, activation: Callable[[], nn.Module] | None = None, length: int = 128) -> Sample:
    """4 layers of 256 units in 4 heads."""
    ids = torch.randint(0, 1024, (batch, length))
    return Sample(_Gpt(activation).train(), (ids,), _next_token, (ids,))


class _Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.a = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.second, self.b = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.short = (
            nn.Identity()
            if stride == 1 and width == out
            else nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.b(self.second(F.relu(self.a(self.first(x))))) + self.short(x))


def resnet(batch: int = 16) -> Sample:
    """0.70M parameters, on 3x32x32."""
    blocks = [_Block(32, 32, 1), _Block(32, 64, 2), _Block(64, 64, 1), _Block(64, 128, 2), _Block(128, 128, 1)]
    stem = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return Sample(model.train(), (torch.randn(batch, 3, 32, 32),), F.cross_entropy, (torch.randint(0, 10, (batch,)),))


def resnet18(batch: int = 8) -> Sample:
    """The 18 layers of ResNet as they are, 11.2M parameters, on 3x64x64."""
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    model = nn.Sequential(*stem, *(_Block(*width) for width in widths), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return Sample(model.train(), (torch.randn(batch, 3, 64, 64),), F.cross_entropy, (torch.randint(0, 10, (batch,)),))


def cnn(batch: int = 16) -> Sample:
    """Four times convolution, BatchNorm, ReLU, on 3x32x32."""
    layers: list[nn.Module] = []
    for width, out, stride in ((3, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2)):
        layers += [nn.Conv2d(width, out, 3, stride, 1), nn.BatchNorm2d(out), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return Sample(model.train(), (torch.randn(batch, 3, 32, 32),), F.cross_entropy, (torch.randint(0, 10, (batch,)),))


def vgg(batch: int = 8) -> Sample:
    """Three times two convolutions, each with ReLU, and a MaxPool, as VGG has them, on 3x64x64."""
    layers: list[nn.Module] = []
    for width, out in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(width, out, 3, 1, 1), nn.ReLU(), nn.Conv2d(out, out, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 8 * 8, 128), nn.ReLU(), nn.Linear(128, 10))
    return Sample(model.train(), (torch.randn(batch, 3, 64, 64),), F.cross_entropy, (torch.randint(0, 10, (batch,)),))


class _NextBlock(nn.Module):
    """As ConvNeXt's: a depthwise convolution of 7x7, LayerNorm over the channels, a feed-forward of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, 1, 3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


def convnext(batch: int = 8) -> Sample:
    """Four blocks of 96 channels on 16x16, behind a stem that takes patches of 4x4."""
    model = nn.Sequential(
        nn.Conv2d(3, 96, 4, 4), *(_NextBlock(96) for _ in range(4)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)
    )
    return Sample(model.train(), (torch.randn(batch, 3, 64, 64),), F.cross_entropy, (torch.randint(0, 10, (batch,)),))


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], both_ways: bool) -> None:
        super().__init__()
        self.cell, self.head = kind(128, 256, bidirectional=both_ways), nn.Linear(512 if both_ways else 256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0][-1])


def recurrent(kind: type[nn.RNNBase], both_ways: bool = False) -> Sample:
    """64 steps, a batch of 32, 128 features, 256 units."""
    return Sample(_Recurrent(kind, both_ways).train(), (torch.randn(64, 32, 128),), F.cross_entropy, (torch.randint(0, 10, (32,)),))


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        for _ in range(100):
            y = _Double.apply(y)
        return y


def chain() -> Sample:
    return Sample(_Chain().train(), (torch.randn(4, 4),), lambda y: y.mean(), ())


class _Bloom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import transformers

        config = transformers.BloomConfig(
            vocab_size=1024, hidden_size=256, n_layer=4, n_head=4, hidden_dropout=0.0, attention_dropout=0.0, use_cache=False,
            attn_implementation="eager",
        )  # fmt: skip
        self.inner = transformers.BloomForCausalLM(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=ids).logits


def bloom() -> Sample:
    """4 layers of 256 units, a batch of 2 x 128; in training mode its GeLU is an autograd Function."""
    ids = torch.randint(0, 1024, (2, 128))
    return Sample(_Bloom().train(), (ids,), _next_token, (ids,))


class _Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import snntorch

        self.first, self.second = nn.Linear(128, 256), nn.Linear(256, 10)
        surrogate = snntorch.surrogate.atan(alpha=2.0)
        self.hidden, self.output = snntorch.Leaky(beta=0.9, spike_grad=surrogate), snntorch.Leaky(beta=0.8, spike_grad=surrogate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        membrane, potential, spikes = self.hidden.init_leaky(), self.output.init_leaky(), 0
        for step in x:
            spike, membrane = self.hidden(self.first(step), membrane)
            spike, potential = self.output(self.second(spike), potential)
            spikes = spikes + potential
        return spikes


def snn() -> Sample:
    """snntorch: two layers of Leaky neurons over 25 steps, a batch of 64, 128 features."""
    return Sample(_Spiking().train(), (torch.randn(25, 64, 128),), F.cross_entropy, (torch.randint(0, 10, (64,)),))


MODELS: dict[str, Callable[[], Sample]] = {
    "gpt-b8": lambda: gpt(8),
    "gpt-b2": lambda: gpt(2),
    "gpt-b2-gelu": lambda: gpt(2, _CustomGelu),
    "bloom": bloom,
    "gpt-b1-512": lambda: gpt(1, length=512),
    "gpt-b1-1024": lambda: gpt(1, length=1024),
    "cnn": cnn,
    "resnet": resnet,
    "resnet18": resnet18,
    "vgg": vgg,
    "convnext": convnext,
    "rnn": lambda: recurrent(nn.RNN),
    "gru": lambda: recurrent(nn.GRU),
    "lstm": lambda: recurrent(nn.LSTM),
    "bi-lstm": lambda: recurrent(nn.LSTM, both_ways=True),
    "snntorch": snn,
    "chain-100": chain,
}
