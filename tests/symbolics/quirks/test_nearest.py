"""Resizes to the nearest element by factors whose places are rounded."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import exporter


class Up(torch.nn.Module):
    def __init__(self, factor, mode, size=None):
        super().__init__()
        self.how = {"scale_factor": factor, "mode": mode, "size": size}

    def forward(self, x):
        return F.interpolate(x, **self.how)


def image(n, rank):
    return torch.arange(float(n**rank)).reshape(1, 1, *[n] * rank)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("factor", [1.7, 2.3, 0.7])
def test_open_sizes(factor, mode, rank, dynamo):
    model, shapes = Up(factor, mode), ({axis + 2: f"size{axis}" for axis in range(rank)},)
    module = exporter.load(exporter.export(model, (image(6, rank),), dynamic_shapes=shapes, dynamo=dynamo))
    for n in (6, 7, *([10, 20, 33] if rank == 1 else [])):
        x, y = (image(n, rank).requires_grad_() for _ in range(2))
        found, wanted = module(x), model(y)
        assert torch.equal(found, wanted)
        assert torch.equal(*(torch.autograd.grad((each * each.detach()).sum(), at)[0] for each, at in ((found, x), (wanted, y))))


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_fixed_sizes_and_a_size_instead_of_a_factor(mode, dynamo):
    for model, n in ((Up(2.3, mode), 33), (Up(2, mode), 5), (Up(None, mode, 15), 6), (Up(None, mode, 4), 7)):
        x = image(n, 1)
        assert torch.equal(exporter.load(exporter.export(model, (x,), dynamo=dynamo))(x), model(x))
