"""Models that call autograd Functions in ordinary use, as people install them.

Each factory returns an `Entry`: the model in the mode in which its Functions run, small and with seeded random weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.utils.checkpoint
from torch import nn

from examples import demo
from tests.zoo.entry import Entry

__all__ = ["PUBLIC", "bloom", "checkpointed", "entmax15", "ibert", "ibert_first_step", "snn", "timm_activations"]


def _from_demo(case: demo.Case) -> Entry:
    return Entry(case.model, case.args, case.allow)


def bloom() -> Entry:
    """transformers' BLOOM, as the demo exports it: its GeLUFunction runs in training mode."""
    entry = _from_demo(demo.bloom())
    batch = torch.export.Dim.DYNAMIC
    entry.dynamic_shapes, entry.sized = ({0: batch}, {0: batch}), lambda batch, _length: demo.tokens(96, batch)
    return entry


def ibert() -> Entry:
    """transformers' I-BERT in quant mode, as the demo exports it: 94 calls in two layers, with None, int, bool and Parameter arguments."""
    return _from_demo(demo.ibert())


def ibert_first_step() -> Entry:
    """I-BERT as it is before its first training step: 99 calls, five of them because the layer norms overflow.

    Its overflow handling is a Python ``if`` on a tensor, so only a tracing exporter can follow it.
    """
    case = demo.ibert(warm=False)
    return Entry(case.model.train(), case.args, case.allow)


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
    shapes = ({0: batch},)
    return Entry(
        SparseAttention(),
        (torch.randn(2, 6, 8),),
        ["entmax.*"],
        dynamic_shapes=shapes,
        sized=lambda batch, _length: (torch.randn(batch, 6, 8),),
    )


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
    from tests.zoo import timm_activations_me as timm

    torch.manual_seed(0)
    activations = [timm.SwishMe(), timm.MishMe(), timm.HardSigmoidMe(), timm.HardSwishMe(), timm.HardMishMe()]
    layers = [layer for activation in activations for layer in (nn.Linear(6, 6), activation)]
    return Entry(nn.Sequential(*layers), (torch.randn(3, 6),), ["tests.zoo.timm_activations_me"])


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


#: name -> factory.
PUBLIC: dict[str, Callable[[], Entry]] = {
    "bloom": bloom,
    "ibert": ibert,
    "entmax15": entmax15,
    "snn": snn,
    "timm_activations": timm_activations,
    "checkpointed": checkpointed,
}
