"""The dropout of attention is in the file: torch's own translations write a node that drops nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import exporter
from symbolics.graph.values import trains
from tests.support import nodes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Attention(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p, self.linear = p, nn.Linear(8, 8)

    def forward(self, x):
        q = self.linear(x)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=self.p)


@pytest.mark.parametrize("optimize", [True, False])
def test_attention_drops(optimize, dynamo):
    model, x = Attention(0.5).train(), torch.randn(1, 2, 16, 8)
    program = exporter.export(model, (x,), dynamo=dynamo, optimize=optimize) if dynamo else exporter.export(model, (x,), dynamo=dynamo)
    assert [trains(node) for node in nodes(program.model, "Dropout")] == [True]
    module = exporter.load(program)
    first, second = module(x), module(x)
    assert not torch.equal(first, second)
    torch.testing.assert_close(
        torch.stack([module(x) for _ in range(300)]).mean(0), Attention.forward(_without(model), x), rtol=0.5, atol=0.15
    )
    torch.testing.assert_close(module.eval()(x), Attention.forward(_without(model), x))


def _without(model):
    other = Attention(0.0)
    other.load_state_dict(model.state_dict())
    return other


def test_without_dropout_there_is_none(dynamo):
    program = exporter.export(Attention(0.0), (torch.randn(1, 2, 4, 8),), dynamo=dynamo)
    assert nodes(program.model, "Dropout") == []
