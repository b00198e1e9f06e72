"""Training steps of six models, and how far a provider is from eager with each after twenty of them.

AdamW makes steps of the size of lr of a gradient that is zero but for rounding: no model here has a parameter whose gradient is zero
in theory (a bias before a normalization, the bias of the keys of attention).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from exporter.train_mode.dropout import dropout_mask
from exporter.training.step import TrainingStep, export_training_step
from tests.providers.sessions import Asked

__all__ = ["STEPS", "StepOnAProvider"]

COUNT = 20


class _Drop(nn.Module):
    """Dropout, whose mask in eager mode is that of a file."""

    def __init__(self, number: int, ratio: float) -> None:
        super().__init__()
        self.number, self.ratio = number, ratio
        self.seed: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seed is None:
            return F.dropout(x, self.ratio, self.training)
        return x * torch.from_numpy(dropout_mask(self.seed, self.number, x.shape, self.ratio)) / (1 - self.ratio)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inner, self.outer = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inner(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outer(found.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.first, self.second = _Attention(16, 2), nn.LayerNorm(16), nn.LayerNorm(16)
        self.inner, self.outer, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 3)
        self.drop = nn.ModuleList(_Drop(number, 0.1) for number in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop[0](self.attention(self.first(x)))
        x = x + self.drop[1](self.outer(F.gelu(self.inner(self.second(x)))))
        return self.head(x.mean(1))


class _Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16), nn.Embedding(7, 16)
        self.attention, self.head = _Attention(16, 2), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x) + self.places(torch.arange(7))
        return self.head((x + self.attention(x))[:, -1])


class _Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.inner, self.head = kind(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x)[0][:, -1])


def _cnn() -> nn.Module:
    first = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(8, 3))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(42, 16), nn.Tanh(), nn.Linear(16, 3))


_SERIES = functools.partial(torch.randn, 5, 7, 6)
_WORDS = functools.partial(torch.randint, 0, 20, (5, 7))
_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "MLP": (_mlp, _SERIES),
    "CNN with BatchNorm and MaxPool": (_cnn, functools.partial(torch.randn, 5, 3, 16, 16)),
    "LSTM": (functools.partial(_Recurrent, nn.LSTM), _SERIES),
    "GRU": (functools.partial(_Recurrent, nn.GRU), _SERIES),
    "transformer block with dropout": (_Block, functools.partial(torch.randn, 5, 7, 16)),
    "embedding with attention": (_Embedded, _WORDS),
}
_OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
}
STEPS = tuple(f"{model}, {optimizer}" for model in _MODELS for optimizer in _OPTIMIZERS)


@dataclass
class StepOnAProvider:
    """A training step beside eager.

    Attributes:
        batches: The step's inputs, one of a kind for each step.
        losses, weights: Eager's, after all of them.
    """

    step: TrainingStep
    batches: list[dict[str, np.ndarray]]
    losses: np.ndarray
    weights: dict[str, np.ndarray]

    @classmethod
    @functools.cache
    def of(cls, name: str) -> StepOnAProvider:
        """The step of a name of `STEPS`."""
        kind, _, rule = name.rpartition(", ")
        make, draw = _MODELS[kind]
        optimizer, numbers = _OPTIMIZERS[rule]
        torch.manual_seed(0)
        model = make().train()
        data = [(draw(), torch.randint(0, 3, (5,))) for _ in range(COUNT)]
        step = export_training_step(
            model, data[0][:1], loss=F.cross_entropy, targets=data[0][1:], optimizer=rule.lower(), hyperparameters=numbers
        )
        names = (*step.layout.inputs, *step.layout.targets)
        batches = [dict(zip(names, (each.numpy() for each in pair), strict=True)) for pair in data]
        return cls(step, batches, *_eager(model, data, optimizer, numbers))

    def beside_eager(self, asked: Asked) -> dict[str, float]:
        """The largest differences of losses and of weights, relative to the largest of each.

        Raises:
            Failed: The provider does not open or run it.
        """
        state, losses, layout = {**self.step.initial}, [], self.step.layout
        asked.open(self.step.model_proto, layout.carried)
        for batch in self.batches:
            results = asked.run(state | batch)
            state.update({name: results[output].reshape(state[name].shape) for output, name in layout.carried.items()})
            losses.append(float(results[layout.loss]))
        far = max(_distance(state[layout.parameters[key]], value) for key, value in self.weights.items())
        return {"losses": _distance(np.array(losses), self.losses), "weights": far}


def _eager(model: nn.Module, data: list[Any], rule: Any, numbers: dict[str, float]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    model, losses = copy.deepcopy(model), []
    optimizer = rule(model.parameters(), **numbers)
    for seed, (x, y) in enumerate(data):  # a step counts its seed from 0
        for module in model.modules():
            if isinstance(module, _Drop):
                module.seed = seed
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses), {name: value.detach().numpy() for name, value in model.named_parameters()}


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())
