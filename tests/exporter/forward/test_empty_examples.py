"""Examples without rows along an open axis, as a structure without edges: the file has what a longer one gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import exporter

EMPTY = torch.randn(4, 3), torch.zeros(0, dtype=torch.long), torch.zeros(0, 3)
FULL = torch.randn(5, 3), torch.tensor([2, 0, 2]), torch.randn(3, 3)
CALLS = {
    "index_add": lambda x, i, v: x.index_add(0, i, v),
    "index_add, scaled": lambda x, i, v: x.index_add(-2, i, v, alpha=2),
    "index_add_": lambda x, i, v: torch.zeros_like(x).index_add_(0, i, v) + x,
    "index_reduce": lambda x, i, v: x.index_reduce(0, i, v, "amax"),
    "scatter_add": lambda x, i, v: x.scatter_add(0, i[:, None].expand_as(v), v),
    "index_put": lambda x, i, v: x.index_put((i,), v, accumulate=True),
}


class Net(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x, i, v):
        return self.call(x, i, v)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_they_give_the_file_of_others(call, dynamo):
    opened = tuple({0: Dim.DYNAMIC} for _ in EMPTY)
    loaded = exporter.load(exporter.export(Net(call), EMPTY, dynamic_shapes=opened, dynamo=dynamo))
    for arguments in (FULL, EMPTY):
        results = []
        for each in (Net(call), loaded):
            x, i, v = (value.clone().requires_grad_(value.is_floating_point()) for value in arguments)
            y = each(x, i, v)
            y.sum().backward()
            results.append((y.detach(), x.grad, v.grad))
        torch.testing.assert_close(*results)


def test_sums_of_rows_without_columns():
    """However many rows there are, nothing is added."""
    arguments = torch.zeros(4, 0), torch.tensor([1, 2]), torch.zeros(2, 0)
    program = exporter.export(Net(CALLS["index_add"]), arguments, dynamo=False)
    assert exporter.load(program)(*arguments).shape == (4, 0)
