"""What torch declares of the results of a model, and what they are."""

from __future__ import annotations

import pytest
import torch

import exporter
from symbolics.quirks import REWRITES
from tests.support import Calls


@pytest.mark.parametrize(
    ("function", "dtype", "dynamo"),
    [(torch.Tensor.tile, torch.float32, False), (torch.Tensor.sum, torch.float16, True)],
    ids=["a rank that is wrong", "a type that is wrong"],
)
def test_results_are_as_in_eager_mode(function, dtype, dynamo, monkeypatch):
    monkeypatch.delitem(REWRITES, function)  # what torch makes of it
    model = Calls(lambda x: function(x, (2, 1, 3)) if function is torch.Tensor.tile else function(x, 1))
    x, z = (torch.arange(6, dtype=dtype).reshape(2, 3).requires_grad_() for _ in range(2))
    y, expected = exporter.load(exporter.export(model, (x,), dynamo=dynamo))(x), model(z)
    torch.testing.assert_close(y, expected)
    for result in (y, expected):
        result.square().sum().backward()
    torch.testing.assert_close(x.grad, z.grad)
