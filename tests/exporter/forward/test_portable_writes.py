"""A portable Function whose backward writes into a view: the file has what was written, or the call stays a PythonOp."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function

import exporter
from tests.support import Calls


class OfDiagonal(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.diagonal(1)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        z = torch.ones_like(x)
        z.diagonal(1).copy_(g)
        return z


class OfStrides(OfDiagonal):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.as_strided((2, 2), (5, 1), 1)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        z = torch.ones_like(x)
        z.as_strided((2, 2), (5, 1), 1).copy_(g)
        return z


@pytest.mark.filterwarnings("ignore:.*stays a PythonOp")
@pytest.mark.parametrize(("function", "kind"), [(OfDiagonal, "function"), (OfStrides, "PythonOp")])
def test_what_backward_writes_into_a_view(function, kind, dynamo):
    x = torch.randn(4, 5, requires_grad=True)
    program = exporter.export(Calls(lambda x: function.apply(x * 2.0)), (x.detach(),), dynamo=dynamo, portable=True)
    assert [call.kind for call in program.portable] == [kind]
    exporter.load(program, allow=[function])(x).sin().sum().backward()
    ours, x.grad = x.grad, None
    function.apply(x * 2.0).sin().sum().backward()
    torch.testing.assert_close(ours, x.grad)
