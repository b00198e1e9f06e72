"""Diagonals with ``dynamo=False``, whose exporter writes an empty tensor of float32 beside them."""

from __future__ import annotations

import pytest
import torch

import exporter
from tests.support import Calls

DIAGONALS = {
    "main": lambda x: (x * x).diagonal(),
    "above": lambda x: (x * x).diagonal(1),
    "below": lambda x: (x * x).diagonal(-2),
    "trace": lambda x: (x * x).trace(),
    "diag": lambda x: torch.diag(x * x, 1),
    "of other axes": lambda x: (x * x).expand(2, 3, *x.shape).diagonal(-1, dim1=-1, dim2=1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("shapes", [None, ({0: "rows", 1: "columns"},)], ids=["fixed", "open"])
def test_as_in_eager(dtype, shapes):
    model = Calls(lambda x: tuple(function(x) for function in DIAGONALS.values()))
    x = torch.arange(12.0).reshape(3, 4).to(dtype)
    module = exporter.load(exporter.export(model, (x,), dynamo=False, dynamic_shapes=shapes and {"args": shapes}))
    for given in (x, x.T.contiguous()) if shapes else (x,):
        for name, found, wanted in zip(DIAGONALS, module(given), model(given), strict=True):
            torch.testing.assert_close(found, wanted, msg=lambda text, name=name: f"{name}: {text}")
    if dtype is torch.float64:
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        sum(out.sum() for out in module(ours)).backward()
        sum(out.sum() for out in model(theirs)).backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_diagonal_is_written_into():
    def writes(x):
        y = x * 2
        y.diagonal().mul_(3)
        y.diagonal(1).zero_()
        return y

    x = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
    assert exporter.verify(Calls(writes), (x,), dynamo=False).ok
