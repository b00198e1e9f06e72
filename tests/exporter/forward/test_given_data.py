"""``parameter.data = value`` in what only Dynamo captures: torch ends the process there, so that it is refused before."""

from __future__ import annotations

import pytest
import torch

import exporter
from symbolics.errors import ExportError


class Momentum(torch.nn.Module):
    """A queue and a second encoder, as in momentum contrast."""

    def __init__(self):
        super().__init__()
        self.query = torch.nn.Linear(6, 8)
        self.key = torch.nn.Linear(6, 8).requires_grad_(False)
        self.register_buffer("queue", torch.randn(8, 20))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        query = self.query(x)
        with torch.no_grad():
            for mine, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.data = mine.data * 0.9 + other.data * 0.1
            key = self.key(x)
        out = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().detach()], 1)
        with torch.no_grad():
            at = int(self.at)
            self.queue[:, at : at + x.shape[0]] = key.T
            self.at[0] = (at + x.shape[0]) % 20
        return out


def test_it_is_refused():
    with pytest.raises(ExportError, match=r"assigns `\.data` of key\.weight, key\.bias(?s:.*)way out"):
        exporter.export(Momentum(), (torch.randn(5, 6),))
