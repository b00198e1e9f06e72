"""300 steps of a small GPT and a small CNN: a training step and eager PyTorch, one curve."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exporter
from exporter.training.step import TrainingStep, export_training_step
from tests.exporter.training.loop import eager, run

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")]
STEPS = 300
RATE = 3e-3


class _Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.after(x))


class Gpt(nn.Module):
    def __init__(self, words=16, length=8, width=16, layers=2):
        super().__init__()
        self.token, self.position = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.Sequential(*(_Block(width, 2) for _ in range(layers))), nn.LayerNorm(width)

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        return self.norm(self.blocks(x)) @ self.token.weight.T  # tied


def _next_token(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.norm2 = nn.Conv2d(4, 6, 3, stride=2), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.first(x))), 2)
        return self.head(F.relu(self.norm2(self.second(x))).mean((2, 3)))


def _case(name, dtype):
    torch.manual_seed(0)
    if name == "gpt":
        # Sentences that can be learned: each word follows from the two before it.
        rows = torch.randint(0, 16, (STEPS, 4, 8))
        for i in range(2, 8):
            rows[..., i] = (3 * rows[..., i - 1] + rows[..., i - 2]) % 16
        return Gpt().to(dtype), _next_token, [(ids, ids) for ids in rows]
    labels = torch.randint(0, 3, (STEPS, 6))
    images = torch.randn(STEPS, 6, 1, 6, 6, dtype=dtype) + 0.5 * labels[:, :, None, None, None].to(dtype)
    return Cnn().to(dtype), F.cross_entropy, list(zip(images, labels, strict=True))


def _exported(model, loss, batches, dynamo=True) -> TrainingStep:
    batch = batches[0]
    return export_training_step(
        copy.deepcopy(model), batch[:1], loss=loss, targets=batch[1:], optimizer="adamw", hyperparameters={"lr": RATE}, dynamo=dynamo
    )


def _eager(model, loss, batches):
    model = copy.deepcopy(model)
    return eager(model, loss, torch.optim.AdamW(model.parameters(), lr=RATE), batches)


def test_gpt_in_float64(dynamo):
    model, loss, batches = _case("gpt", torch.float64)
    found, _ = run(_exported(model, loss, batches, dynamo), batches)
    expected = _eager(model, loss, batches)
    assert np.mean(expected[-20:]) < np.mean(expected[:20]) * 0.7
    assert np.abs(np.subtract(found, expected)).max() < 1e-6


@pytest.mark.unusable(reason="onnxruntime has no Conv of float64 on the CPU")
def test_cnn_in_float64(dynamo):
    """On onnx.reference: onnxruntime has no Conv of float64."""
    model, loss, batches = _case("cnn", torch.float64)
    step = _exported(model, loss, batches, dynamo)
    evaluator = exporter.reference_evaluator(step.model)
    names, state, found = [value.name for value in step.model.graph.outputs], dict(step.initial), []
    for x, y in batches:
        results = dict(zip(names, evaluator.run(None, {**state, "x": x.numpy(), "target": y.numpy()}), strict=True))
        state.update({name: results[output] for output, name in step.layout.carried.items()})
        found.append(float(results["loss"]))
    expected = _eager(model, loss, batches)
    assert np.mean(expected[-20:]) < np.mean(expected[:20]) * 0.7
    assert np.abs(np.subtract(found, expected)).max() < 1e-6


@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_in_float32_inside_twice_eagers_envelope(name):
    """Eager against eager with parameters moved by one ulp, and with another thread count: five runs."""
    model, loss, batches = _case(name, torch.float32)
    found, _ = run(_exported(model, loss, batches), batches)
    expected = _eager(model, loss, batches)
    envelope = np.zeros(STEPS)
    for number in range(5):
        other = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(number)
        threads = torch.get_num_threads()
        if number < 4:
            with torch.no_grad():
                for p in other.parameters():
                    up = torch.rand(p.shape, generator=generator) < 0.5
                    p.copy_(torch.nextafter(p, torch.where(up, torch.inf, -torch.inf)))
        else:
            torch.set_num_threads(2 if threads == 1 else 1)
        try:
            envelope = np.maximum(envelope, np.abs(np.subtract(_eager(other, loss, batches), expected)))
        finally:
            torch.set_num_threads(threads)
    # Chaos grows: what was seen before a step may be seen at it.
    widest = np.maximum.accumulate(envelope)
    away = np.abs(np.subtract(found, expected))
    print(f"{name}: largest distance {away.max():.2e}, eager's own envelope {widest[-1]:.2e}")
    assert (away <= 2 * widest + 1e-6 * np.abs(expected)).all()
