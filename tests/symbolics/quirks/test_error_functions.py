"""erfc has digits where it is nearly nothing."""

from __future__ import annotations

import torch

import exporter
from tests.support import Calls


def test_values_and_slopes(dynamo):
    x = torch.linspace(-6, 9, 4001)
    module = exporter.load(exporter.export(Calls(torch.erfc), (x,), dynamo=dynamo))
    mine, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    found, wanted = module(mine), torch.erfc(exact)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)
    slopes = [torch.autograd.grad(value.sum(), at)[0].double() for value, at in ((found, mine), (wanted, exact))]
    torch.testing.assert_close(*slopes, rtol=1.5e-5, atol=0)


def test_far_away(dynamo):
    x = torch.tensor([-torch.inf, -1e30, -20, 20, 1e30, torch.inf, torch.nan])
    module = exporter.load(exporter.export(Calls(lambda x: (torch.erfc(x), x.clone().erfc_(), x.half().erfc())), (x,), dynamo=dynamo))
    for found, wanted in zip(module(x), (torch.erfc(x), torch.erfc(x), torch.erfc(x.half())), strict=True):
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
