"""Rows of what a Function returns."""

from __future__ import annotations

import torch
from torch.autograd import Function

from tests.end_to_end.functions.case import case


class Many(Function):
    @staticmethod
    def forward(ctx, x, count):
        return tuple(x * (i + 1) for i in range(count))

    @staticmethod
    def backward(ctx, *grads):
        return sum(g * (2 * i + 3) for i, g in enumerate(grads)), None


@case()
def one_output(m, x):
    (y,) = Many.apply(x * m.weight, 1)
    return y


@case()
def many_outputs(m, x):
    outputs = Many.apply(x * m.weight, 5)
    return outputs[0] + outputs[3], outputs[4]


class OneTuple(Function):
    @staticmethod
    def forward(ctx, x):
        return (x.sin(),)

    @staticmethod
    def backward(ctx, g):
        return g * 3


@case()
def one_tuple(m, x):
    result = OneTuple.apply(x * m.weight)
    assert type(result) is tuple and len(result) == 1
    return result[0] * 2


class WithNone(Function):
    """Liger's cross entropy returns (loss, None, None, None)."""

    @staticmethod
    def forward(ctx, x):
        return x.sum(-1), None, x * 2, None

    @staticmethod
    def backward(ctx, g, n, g2, n2):
        assert n is None and n2 is None
        return g[:, None] + g2 * 7


@case()
def none_outputs(m, x):
    y, nothing, z, _ = WithNone.apply(x * m.weight)
    assert nothing is None
    return y, z


class NonTensor(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, "text", {"a": 1}, 3

    @staticmethod
    def backward(ctx, g, *rest):
        assert rest == (None, None, None)
        return g * 5


@case()
def non_tensor_outputs(m, x):
    y, text, table, three = NonTensor.apply(x * m.weight)
    assert text == "text" and table == {"a": 1}
    return y * three


class WithInteger(Function):
    @staticmethod
    def forward(ctx, x):
        value, index = x.max(-1)
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return value, index, index > 1

    @staticmethod
    def backward(ctx, g, gi, gb):
        assert gi.dtype is torch.int64 and not gi.any()
        return torch.zeros(ctx.shape).scatter_(-1, ctx.saved_tensors[0][:, None], 3 * g[:, None])


@case()
def integer_outputs(m, x):
    value, index, flag = WithInteger.apply(x * m.weight)
    return value, index, flag


class AsIs(Function):
    """revgrad: the input is the output."""

    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x

    @staticmethod
    def backward(ctx, g):
        return -g * ctx.alpha, None


@case()
def input_as_is(m, x):
    h = x * m.weight
    return AsIs.apply(h, 0.1) + h


class AsIsInteger(Function):
    @staticmethod
    def forward(ctx, x, index):
        return x * 2, index

    @staticmethod
    def backward(ctx, g, gi):
        return g * 3, None


@case(inputs=lambda: (torch.randn(3, 4), torch.arange(4)))
def integer_input_as_is(m, x, index):
    y, again = AsIsInteger.apply(x * m.weight, index)
    return y * again, again + 1


class View(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, g):
        return g.view(-1, 4) * 3


@case()
def view_of_input(m, x):
    return View.apply(x * m.weight) + 1


class StridedView(Function):
    @staticmethod
    def forward(ctx, x):
        return x.t()[::2]

    @staticmethod
    def backward(ctx, g):
        out = torch.zeros(g.shape[1], 4)
        out[:, ::2] = g.t()
        return out * 3


@case()
def non_contiguous_view_of_input(m, x):
    return StridedView.apply(x * m.weight)


class Twice(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sin()
        return y, y

    @staticmethod
    def backward(ctx, a, b):
        return a * 3 + b * 5


@case()
def same_tensor_twice(m, x):
    a, b = Twice.apply(x * m.weight)
    return a * 2 + b * 7


class Flagged(Function):
    """flash-attention: return_softmax decides how many outputs there are."""

    @staticmethod
    def forward(ctx, x, more):
        return (x * 2, x.sum(-1), x.max()) if more else x * 2

    @staticmethod
    def backward(ctx, g, *rest):
        return g * 3 + (rest[0][:, None] + rest[1] if rest else 0), None


@case()
def number_depends_on_a_flag(m, x):
    a, b, c = Flagged.apply(x * m.weight, True)
    return a + b[:, None] + c + Flagged.apply(x, False)


class Selected(Function):
    @staticmethod
    def forward(ctx, x):
        mask = x > 0
        ctx.save_for_backward(mask)
        return x[mask]

    @staticmethod
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        return torch.zeros(mask.shape).masked_scatter_(mask, g * 3)


@case()
def data_dependent_size(m, x):
    return Selected.apply(x * m.weight) * 2


class Lists(Function):
    """A list is not tracked by autograd: its tensors need no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 2, [x + 1, x + 2]

    @staticmethod
    def backward(ctx, g, nothing):
        return g * 3


@case()
def list_output(m, x):
    y, (a, b) = Lists.apply(x * m.weight)
    return y + a.detach() + b.detach()


class Scalar(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx, g):
        return g.expand(ctx.shape) * 3


@case()
def scalar_output(m, x):
    return Scalar.apply(x * m.weight)
