"""Indices in int32, in a forward and in the bodies of portable Functions: values and gradients as in eager mode."""

from __future__ import annotations

import pytest
import torch

import exporter
from tests.support import Calls


def _set(x, i):
    y = x.clone()
    y[i, i] = x[0, :3] * 2
    return y


def _all(x, i):
    results = (
        x[i], x[:, i], x[i, i], x.index_select(0, i), x.index_put((i,), x[:3] * 2), x.index_put((i,), x[:3], accumulate=True), _set(x, i),
        x.index_add(0, i, x[:3]), torch.nn.functional.embedding(i, x), x.unfold(1, 2, 1),
    )  # fmt: skip
    return torch.cat([(result * (n + 1)).flatten() for n, result in enumerate(results)])


class Indexes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, i):
        ctx.save_for_backward(x, i)
        return _all(x, i)

    @staticmethod
    def backward(ctx, g):
        x, i = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(_all(x, i), x, g)[0], None


@pytest.mark.parametrize(("function", "dynamo"), [(_all, True), (_all, False), (Indexes.apply, True)])
def test_as_in_eager(function, dynamo):
    x, i = torch.randn(4, 4), torch.tensor([0, 2, 1], dtype=torch.int32)
    program = exporter.export(Calls(function), (x, i), dynamo=dynamo, portable=function is not _all)
    assert not any(node.op_type == "PythonOp" for node in program.model.graph)
    module, (one, two) = exporter.load(program), (x.clone().requires_grad_() for _ in range(2))
    expected, found = function(one, i), module(two, i)
    torch.testing.assert_close(found, expected)
    seed = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(found, two, seed), torch.autograd.grad(expected, one, seed))
