"""squeeze() of outputs whose other axes are open: they train at every size, and run at size 1, where PyTorch drops one axis more."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter
from tests.zoo.functions import SavesOutput


class Scores(nn.Module):
    def __init__(self, after) -> None:
        super().__init__()
        self.hidden, self.score, self.after = nn.Linear(6, 6), nn.Linear(6, 1), after

    def forward(self, x):
        return self.after(self.score(SavesOutput.apply(self.hidden(x))).squeeze())


@pytest.mark.parametrize("after", [lambda y: y, lambda y: y * 2, lambda y: torch.sigmoid(y) - 1], ids=["alone", "scaled", "more"])
def test_they_train(after, dynamo):
    torch.manual_seed(0)
    model = Scores(after)
    program = exporter.export(model, (torch.randn(3, 6),), dynamo=dynamo, dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}})
    loaded = exporter.load(program, allow=["tests.zoo.*"])
    torch.testing.assert_close(loaded(x := torch.randn(1, 6)), model(x))
    for batch in (3, 5, 2):
        x = torch.randn(batch, 6)
        grads = []
        for each in (model, loaded):
            each.zero_grad()
            y = each(x)
            (y * y).sum().backward()
            grads.append(dict(each.named_parameters())["hidden.weight"].grad.clone())
        torch.testing.assert_close(*grads)
