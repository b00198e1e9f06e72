"""BatchNorm that trains in a loaded file, once its running statistics are no longer finite."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import exporter


class Twice(nn.Module):
    """One module, two calls: the second follows the first's statistics."""

    def __init__(self, momentum):
        super().__init__()
        self.norm = nn.BatchNorm2d(2, momentum=momentum)

    def forward(self, x):
        return self.norm(self.norm(x).exp() * x).sin()


@pytest.mark.parametrize("momentum", [0.1, None], ids=["share", "average"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=["inf", "nan"])
def test_one_bad_batch_spoils_the_buffers_and_no_later_gradient(momentum, bad):
    torch.manual_seed(0)
    model = Twice(momentum)
    loaded = exporter.load(exporter.export(copy.deepcopy(model), (torch.randn(3, 2, 4, 4),), dynamo=False)).train()
    for spoiled in (False, True, False, False):
        x = torch.randn(3, 2, 4, 4)
        if spoiled:
            x[0, 1, 0, 0] = bad
        results = []
        for module in (model, loaded):
            v = x.clone().requires_grad_()
            y = module(v)
            (grad,) = torch.autograd.grad(y.square().sum(), v)
            results.append([y.detach(), grad, *(module.get_buffer(f"norm.running_{name}").clone() for name in ("mean", "var"))])
        torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3, equal_nan=True)
        assert bool(results[1][1].isfinite().all()) is not spoiled
