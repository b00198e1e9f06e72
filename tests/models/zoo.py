"""Models that call autograd Functions in ordinary use, as people install them.

Each factory returns an `Entry`: the model in the mode in which its Functions run, small and with seeded random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

__all__ = ["ZOO", "Entry", "bloom", "checkpointed", "entmax15", "ibert", "ibert_first_step", "snn", "timm_activations"]


@dataclass
class Entry:
    """A model to export.

    Attributes:
        model, args: The model and example arguments of its forward.
        allow: What a fresh process has to allow.
        inlined: How many of eager's calls are inlined on their own (reentrant checkpoints).
        dynamic_shapes: As torch.export.export takes them, for entries whose batch may vary.
        larger_args: Arguments with another batch, for the same entries.
    """

    model: nn.Module
    args: tuple[Any, ...]
    allow: list[str] = field(default_factory=list)
    inlined: int = 0
    dynamic_shapes: Any = None
    larger_args: tuple[Any, ...] | None = None


class OneTensor(nn.Module):
    """A model of transformers with one tensor in and one out, so that file and eager are compared without its containers."""

    def __init__(self, model: nn.Module, output: str) -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The named output."""
        return getattr(self.model(ids, attention_mask=mask), self.output)


def _ids(batch: int, length: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(3, vocabulary, (batch, length), generator=generator)
    return ids, torch.ones_like(ids)


def bloom(layers: int = 2) -> Entry:
    """transformers' BLOOM: its GeLUFunction runs in training mode."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    config = BloomConfig(vocab_size=96, hidden_size=32, n_layer=layers, n_head=4, hidden_dropout=0.0, attention_dropout=0.0, use_cache=False, attn_implementation="eager")
    model = BloomForCausalLM(config).train()
    batch = torch.export.Dim.DYNAMIC
    return Entry(
        OneTensor(model, "logits").train(),
        _ids(2, 7, 96),
        ["transformers.models.bloom.*"],
        dynamic_shapes=({0: batch}, {0: batch}),
        larger_args=_ids(5, 7, 96),
    )


def ibert(layers: int = 2) -> Entry:
    """transformers' I-BERT in quant mode: 94 calls in two layers, with None, int, bool and Parameter arguments.

    In training mode the first forward makes five more, one a layer norm: it branches on the data when its statistics
    overflow, which torch.export refuses (`ibert_first_step`).
    """
    from transformers import IBertModel

    torch.manual_seed(0)
    model = IBertModel(_ibert_config(layers), add_pooling_layer=False).train()
    with torch.no_grad():
        for seed in range(2):  # the activation ranges are running statistics: a forward or two fill them
            model(*_ids(2 + seed, 7, 64))
    return Entry(OneTensor(model.eval(), "last_hidden_state").eval(), _ids(2, 7, 64), ["transformers.models.ibert.*"])


def ibert_first_step() -> Entry:
    """I-BERT as it is before its first training step: 99 calls, five of them because the layer norms overflow.

    Its overflow handling is a Python ``if`` on a tensor, so only a tracing exporter can follow it.
    """
    from transformers import IBertModel

    torch.manual_seed(0)
    model = IBertModel(_ibert_config(2), add_pooling_layer=False)
    return Entry(OneTensor(model, "last_hidden_state").train(), _ids(2, 7, 64), ["transformers.models.ibert.*"])


def _ibert_config(layers: int) -> Any:
    from transformers import IBertConfig

    return IBertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=48, max_position_embeddings=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, quant_mode=True,
    )  # fmt: skip


class SparseAttention(nn.Module):
    """A layer of attention whose weights are entmax15's."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) -> the same."""
        from entmax import entmax15

        weights = entmax15(self.query(x) @ self.key(x).transpose(-1, -2), dim=-1)
        return weights @ self.value(x)


def entmax15() -> Entry:
    """entmax's entmax15: sorting and cumulative sums in its forward, a classmethod."""
    torch.manual_seed(0)
    batch = torch.export.Dim.DYNAMIC
    return Entry(SparseAttention(), (torch.randn(2, 6, 8),), ["entmax.*"], dynamic_shapes=({0: batch},), larger_args=(torch.randn(5, 6, 8),))


class SpikingNet(nn.Module):
    """Two layers of snntorch's Leaky neurons over four time steps."""

    def __init__(self) -> None:
        super().__init__()
        import snntorch
        from snntorch import surrogate

        self.first, self.second = nn.Linear(10, 16), nn.Linear(16, 4)
        self.leaky = snntorch.Leaky(beta=0.9, spike_grad=surrogate.atan(alpha=2.0))
        self.output = snntorch.Leaky(beta=0.8, spike_grad=surrogate.fast_sigmoid(slope=25))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(steps, batch, 10) -> spikes and membrane potentials of the last layer, a step each."""
        membrane, potential = self.leaky.init_leaky(), self.output.init_leaky()
        spikes, potentials = [], []
        for step in range(4):
            spike, membrane = self.leaky(self.first(x[step]), membrane)
            spike, potential = self.output(self.second(spike), potential)
            spikes.append(spike)
            potentials.append(potential)
        return torch.stack(spikes), torch.stack(potentials)


def snn() -> Entry:
    """snntorch: surrogate gradients of spikes, and detach() in the reset."""
    torch.manual_seed(0)
    return Entry(SpikingNet(), (3 * torch.randn(4, 2, 10),), ["snntorch.surrogate"])


def timm_activations() -> Entry:
    """timm's five memory-efficient activations; two of them have a ``symbolic``, which an opaque node does not use."""
    from tests.models import timm_activations_me as timm

    torch.manual_seed(0)
    activations = [timm.SwishMe(), timm.MishMe(), timm.HardSigmoidMe(), timm.HardSwishMe(), timm.HardMishMe()]
    layers = [layer for activation in activations for layer in (nn.Linear(6, 6), activation)]
    return Entry(nn.Sequential(*layers), (torch.randn(3, 6),), ["tests.models.timm_activations_me"])


class Checkpointed(nn.Module):
    """An encoder whose blocks run under torch's reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 6) -> the same."""
        for block in self.blocks:
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        return x


def checkpointed() -> Entry:
    """torch.utils.checkpoint, reentrant: its parameters hide in a closure, so its calls are inlined."""
    torch.manual_seed(0)
    return Entry(Checkpointed(), (torch.randn(2, 6, requires_grad=True),), inlined=3)


#: name -> factory, the models of tests/models/test_export_models.py.
ZOO: dict[str, Callable[[], Entry]] = {
    "bloom": bloom,
    "ibert": ibert,
    "entmax15": entmax15,
    "snn": snn,
    "timm_activations": timm_activations,
    "checkpointed": checkpointed,
}
