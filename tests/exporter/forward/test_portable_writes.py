"""A portable Function whose backward writes into a view: the file has what was written, or the call stays a PythonOp."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import Function

import exporter
from exporter.forward import portable
from symbolics.errors import PythonopWarning
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


def whole(e):
    return e


def flat(e):
    return e.view(-1, e.shape[-1])


def halves(e):
    return e.chunk(2, -1)[0]


def as_list(e):
    return e.unbind(0)[1]


WAYS = {
    "itself": (whole, lambda e, g: e.copy_(g)),
    "view": (flat, lambda e, g: e.copy_(g)),
    "view of a view": (lambda e: flat(e).t()[1:], lambda e, g: e.mul_(2)),
    "chunk": (halves, lambda e, g: e.zero_()),
    "unbind": (as_list, lambda e, g: e.add_(1)),
    "diagonal": (lambda e: e.diagonal(), lambda e, g: e.zero_()),
    "out": (flat, lambda e, g: torch.mul(g, 2.0, out=e)),
    "index": (flat, lambda e, g: e.__setitem__(0, 1.0)),
    "foreach": (flat, lambda e, g: torch._foreach_mul_([e], 2.0)),
}


@pytest.mark.parametrize("name", WAYS)
def test_what_forward_has_saved_and_backward_changes(name, dynamo):
    view, change = WAYS[name]

    class Overwrites(Function):
        @staticmethod
        def forward(ctx, x, w):
            e = x @ w
            ctx.save_for_backward(x, w, e)
            return e.sigmoid()

        @staticmethod
        def backward(ctx, g):
            x, w, e = ctx.saved_tensors
            slope = g * e.sigmoid() * (1 - e.sigmoid())
            change(view(e), slope)
            return (slope + e) @ w.t(), x.t() @ (slope + e)

    model = nn.Linear(4, 4, bias=False)
    model.forward = lambda x: Overwrites.apply(x * 2.0, model.weight)
    with pytest.warns(
        PythonopWarning, match="stays a PythonOp, and the file needs Python: its backward changes a tensor that its forward has saved"
    ):
        program = exporter.export(model, (torch.randn(4, 4),), dynamo=dynamo, portable=True)
    assert [call.kind for call in program.portable] == ["PythonOp"]


@pytest.mark.filterwarnings("ignore:.*stays a PythonOp")
def test_what_cannot_be_parted_stays_a_PythonOp(monkeypatch, dynamo):
    def unbounded(*args):
        raise ValueError("the subgraph is not properly bounded")

    monkeypatch.setattr(portable, "functions_of", unbounded)
    program = exporter.export(
        Calls(lambda x: OfDiagonal.apply(x * 2.0)), (torch.randn(4, 5, requires_grad=True),), dynamo=dynamo, portable=True
    )
    (call,) = program.portable
    assert (call.kind, call.reason) == (
        "PythonOp",
        "its forward and its backward cannot be parted into two functions of the file (ValueError: the subgraph is not properly bounded)",
    )
