"""Models whose two runs differ: the error says who draws, and the way out that helps there."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import exporter


class Draws(nn.Module):
    def forward(self, x):
        return x * torch.rand_like(x)


class Bernoulli(nn.Module):
    def forward(self, x):
        return x * torch.empty_like(x).bernoulli_(0.5)


class Counts(nn.Module):
    """Keeps state where nothing sees it."""

    turns = 0

    def forward(self, x):
        Counts.turns += 1
        return x * Counts.turns


LINE = r"aten.rand_like at test_drawn.py:\d+, in forward: return x \* torch.rand_like\(x\)"


@pytest.mark.parametrize(
    ("model", "said", "ways"),
    [
        (Draws(), rf"its forward draws random numbers \({LINE}\)", ["random numbers"]),
        (Bernoulli(), r"its forward draws random numbers \(aten.bernoulli_.float at test_drawn.py", ["random numbers"]),
        (
            nn.Sequential(nn.Dropout(0.5), Draws()),
            rf"its forward draws random numbers \({LINE}\), and it drops out \(Dropout '0'\)",
            ["random numbers", "dropout"],
        ),
        (nn.Sequential(nn.RReLU()), r"it drops out \(RReLU '0'\)", ["dropout"]),
        (Counts(), "it keeps state between calls, or draws random numbers without torch", ["random numbers", "state"]),
    ],
)
def test_who_draws_is_said_and_what_helps(model, said, ways):
    with pytest.raises(exporter.PythonopError, match=f"two runs of the model with one input differ: {said}") as caught:
        exporter.verify(model.train(), (torch.randn(3, 6),))
    assert re.findall(r"^  (.*?): ", str(caught.value), re.MULTILINE) == ways and str(caught.value).count("\n") < 6
    texts = {"random numbers": "draw outside of the model", "dropout": r"dropout 0 .*eval\(\)", "state": "pass it to the model as a tensor"}
    assert all(re.search(texts[way], str(caught.value)) for way in ways)


class Small(nn.Module):
    """Its outputs are small, and a dropout is in them."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))

    def forward(self, x):
        return self.body(x) * 1e-5


def test_a_dropout_is_seen_in_small_outputs():
    torch.manual_seed(0)
    assert exporter.verify(Small().train(), (torch.randn(8, 6),), steps=1).ok


class Samples(nn.Module):
    def forward(self, x):
        return torch.multinomial(x.softmax(-1), 4, replacement=True)


def test_draws_are_seen_in_integers():
    with pytest.raises(exporter.PythonopError, match="its forward draws random numbers .aten.multinomial"):
        exporter.verify(Samples(), (torch.randn(8, 6),))
