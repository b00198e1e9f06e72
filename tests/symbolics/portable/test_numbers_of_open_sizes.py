"""What is computed from an open size, as a number among an operator's arguments: the same as in eager mode at all sizes, or a reason that says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

import exporter
from symbolics.errors import PythonopWarning


class Net(nn.Module):
    def __init__(self, function, *others):
        super().__init__()
        self.function, self.others = function, others

    def forward(self, x):
        return self.function.apply(x * 1.0, *self.others)


def recomputes(op):
    """A Function whose backward differentiates what its forward computes."""

    class Recomputes(Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            return op(*inputs)

        @staticmethod
        def backward(ctx, g):
            with torch.enable_grad():
                inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
                y = op(*inputs)
            return torch.autograd.grad(y, inputs, g)

    return Recomputes


def check(function, shapes, axes, dynamo, dtype=torch.float32):
    """Export with open axes of the first of the tensors, and compare with eager on all shapes; the other tensors stay."""
    (x, *others), *more = [[torch.randn(shape, dtype=dtype) for shape in each] for each in shapes]
    call = Net(function, *others)
    spec = {axis: torch.export.Dim(f"n{axis}") for axis in axes}
    program = exporter.export(call, (x.clone().requires_grad_(),), dynamo=dynamo, portable=True, dynamic_shapes={"x": spec})
    assert [(call.kind, call.reason) for call in program.portable] == [("function", "")]
    loaded = exporter.load(program)
    for each in (x, *(values[0] for values in more)):
        ours, theirs = (each.clone().requires_grad_() for _ in range(2))
        y, z = loaded(ours), call(theirs)
        torch.testing.assert_close(y, z)
        g = torch.randn_like(z)
        y.backward(g)
        z.backward(g)
        torch.testing.assert_close(ours.grad, theirs.grad, **({"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {}))


OPERATORS = {
    "std": lambda x: x * x.std(0, unbiased=False),
    "var": lambda x: x * x.var(0),
    "reflect": lambda x: F.pad(x[:, None, :, None].expand(-1, 2, -1, 6), (1, 2, 2, 1), "reflect"),
    "clamp": lambda x: x.clamp(0, x.shape[0] - 1),
    "clamped places": lambda x: x[torch.arange(9).clamp(0, x.shape[0] - 1)],
    "product": lambda x: torch.ops.aten.mul.Scalar(x, 1 / x.shape[0]),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_number(name, dynamo):
    check(recomputes(OPERATORS[name]), [[(4, 6)], [(9, 6)], [(2, 6)]], [0], dynamo)


@pytest.mark.parametrize("name", ["std", "product"])
def test_all_digits_of_it(name):
    check(recomputes(OPERATORS[name]), [[(4, 6)], [(7, 6)]], [0], False, torch.float64)


class OfConvolution(Function):
    stride, padding, dilation = 2, 1, 1

    @classmethod
    def forward(cls, ctx, x, w):
        ctx.save_for_backward(x, w)
        return F.conv2d(x, w, None, cls.stride, cls.padding, cls.dilation)

    @classmethod
    def backward(cls, ctx, g):
        x, w = ctx.saved_tensors
        how = (cls.stride, cls.padding, cls.dilation)
        return torch.nn.grad.conv2d_input(x.shape, w, g, *how), torch.nn.grad.conv2d_weight(x, w.shape, g, *how)


class Far(OfConvolution):
    stride = 3


class Wide(OfConvolution):
    padding, dilation = 3, 2


@pytest.mark.parametrize("function", [OfConvolution, Far, Wide])
def test_gradients_of_a_strided_convolution(function):
    shapes = [[(2, 4, h, w), (6, 4, 3, 3)] for h, w in ((7, 8), (8, 7), (9, 12), (10, 13))]
    check(function, shapes, [2, 3], False)


OF_NUMBERS = [
    lambda x: torch.addcmul(x, x, x, value=1 / x.shape[0]),
    lambda x: F.leaky_relu(x, 1 / x.shape[0]),
    lambda x: x.clamp(0, 5 / x.shape[0]),
]


@pytest.mark.parametrize("op", OF_NUMBERS)
def test_who_takes_numbers_alone_says_so(op, dynamo):
    call = Net(recomputes(op))
    why = "torch.onnx translates aten.* for numbers alone, and one of its arguments is computed from an open size: give that axis a fixed size"
    x = torch.randn(4, 6, requires_grad=True)
    with pytest.warns(PythonopWarning, match=why):
        program = exporter.export(call, (x,), dynamo=dynamo, portable=True, dynamic_shapes={"x": {0: "batch"}})
    assert [call.kind for call in program.portable] == ["PythonOp"]
    program = exporter.export(call, (x,), dynamo=dynamo, portable=True)
    assert [call.kind for call in program.portable] == ["function"]
