"""Functions and models of the feature's older implementation: what it accepted, and what it got wrong."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from tests.end_to_end.functions import other_module

__all__: list[str] = []


class TensorAndParameter(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return 2 * g * weight, (3 * g * x).sum(0)


class Identity(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 0.5


class Mixed(Function):
    """Scalars and tuples in any order among tensors, checked by value and type."""

    @staticmethod
    def forward(ctx, a, x, b, flags, y, floats, flag, text):
        assert (a, b, flags, floats, flag, text) == (3, 0.1, (True, False), (0.5, 1e-300), True, "mean")
        assert [type(v) for v in (a, b, flags[0], floats[1], flag)] == [int, float, bool, float, bool]
        ctx.a, ctx.b = a, b
        return x * a + y * b

    @staticmethod
    def backward(ctx, g):
        return None, g * ctx.a * 2, None, None, g * ctx.b * 2, None, None, None


class DirtyReturned(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 3


class UndeclaredReturned(Function):
    @staticmethod
    def forward(ctx, x):
        return x.mul_(2).clone()

    @staticmethod
    def backward(ctx, g):
        return g * 3


class UndeclaredAsIs(Function):
    @staticmethod
    def forward(ctx, x):
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 3


class UndeclaredNotReturned(Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 4
        x.zero_()
        return y

    @staticmethod
    def backward(ctx, g):
        return g * 3


class DirtyAfterInPlace(Function):
    @staticmethod
    def forward(ctx, x):
        x.add_(1)
        x.mul_(3)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.clone())
        return x

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].sign()


class TwoOutputs(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x.sin()

    @staticmethod
    def backward(ctx, a, b):
        return a * 3 + b * 5


class IndexAsIs(Function):
    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x[index], index

    @staticmethod
    def backward(ctx, g, gi):
        assert gi.dtype is torch.int64
        return torch.zeros(ctx.rows, g.shape[1]).index_add_(0, ctx.saved_tensors[0], g * 2), None


class ThreeMaterialized(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x[:, :1].double(), x.sum()

    @staticmethod
    def backward(ctx, a, b, c):
        assert b.dtype is torch.float64 and b.shape == (a.shape[0], 1) and not b.any()
        return a * 3 + c


class ThreeNotMaterialized(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x[:, :1].double(), x.sum()

    @staticmethod
    def backward(ctx, a, b, c):
        assert b is None
        return a * 3 + c


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x.tanh() * self.factor


class WrapsModule(Function):
    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            ctx.leaf = x.detach().requires_grad_()
            ctx.y = Scaled(3.0)(ctx.leaf)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, g):
        return torch.autograd.grad(ctx.y, ctx.leaf, g)[0] * 2


class NeverBackward(Function):
    """Nothing that it takes needs a gradient, so its backward never runs."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        raise AssertionError("backward of an output without grad_fn")


class SavesActivation(Function):
    @staticmethod
    def forward(ctx, x, weight):
        h = x * weight
        ctx.save_for_backward(x, weight, h)
        return h.tanh() + x

    @staticmethod
    def backward(ctx, g):
        x, weight, h = ctx.saved_tensors
        slope = g / h.cosh().square()
        return slope * weight + g, (slope * x).sum(0)


class OddShape(Function):
    """No shape inference could guess it."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.reshape(-1)[:: max(1, x.shape[0] // 2)].repeat(3)

    @staticmethod
    def backward(ctx, g):
        out = torch.zeros(ctx.shape[0] * ctx.shape[1])
        step = max(1, ctx.shape[0] // 2)
        out[::step] = g.reshape(3, -1).sum(0) * 2
        return out.reshape(ctx.shape)


class ReturnsParameter(Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * 2, weight

    @staticmethod
    def backward(ctx, g, gw):
        return g * 3, gw * 5


class Recomputes(Function):
    """A checkpoint with dropout: backward draws the same mask again."""

    @staticmethod
    def forward(ctx, x):
        ctx.state = torch.get_rng_state()
        ctx.save_for_backward(x)
        return x * (torch.rand(x.shape) < 0.5)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.state)
            return g * (torch.rand(x.shape) < 0.5) * 2


class AllReduce(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        y = x.clone()
        torch.distributed.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        torch.distributed.all_reduce(g, group=ctx.group)
        return g * 2, None


class NoneGradient(Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * weight

    @staticmethod
    def backward(ctx, g):
        return g * 2, None


class StridedOutput(Function):
    @staticmethod
    def forward(ctx, x):
        return x.t()[1:]

    @staticmethod
    def backward(ctx, g):
        return torch.cat([torch.zeros(1, g.shape[1]), g * 2]).t()


class RankChanges(Function):
    @staticmethod
    def forward(ctx, x):
        return x[None, :, None], x.sum()

    @staticmethod
    def backward(ctx, a, b):
        return a[0, :, 0] * 2 + b * 3


class NoTensorInput(Function):
    @staticmethod
    def forward(ctx, rows, value):
        return torch.full((rows, 4), value)

    @staticmethod
    def backward(ctx, g):
        return None, None


class ReturnsNone(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, None

    @staticmethod
    def backward(ctx, g, nothing):
        assert nothing is None
        return g * 3


class AnyArguments(Function):
    @staticmethod
    def forward(ctx, x, names, options, dtype, nothing, nested):
        assert (names, options, dtype, nothing, nested) == (["a", "b"], {"k": (1, None)}, torch.float16, None, ((), [1.5, ("x",)]))
        return x * len(names)

    @staticmethod
    def backward(ctx, g):
        return (g * 3, *[None] * 5)


# -------------------------------------------------------------------------------------------------- models: (m, x)


def used_inside(m, x):
    inner = TensorAndParameter.apply(m.linear(x), m.weight)
    return torch.tanh(inner).sum(-1)


def shared_inputs(m, x):
    h = m.linear(x)
    return TensorAndParameter.apply(h, m.weight) + TwoOutputs.apply(h)[1] + TensorAndParameter.apply(h, m.weight)


def in_place_without_mark_then_unused(m, x):
    return UndeclaredNotReturned.apply(m.linear(x)) * m.weight


def three(function):
    def body(m, x):
        a, _, c = function.apply(m.linear(x))
        return a * m.weight + c

    return body


def never_backward(m, x):
    return NeverBackward.apply(m.linear(x).detach()) * m.weight


def ten_layers(m, x):
    x = m.linear(x)
    for _ in range(10):
        x = SavesActivation.apply(x, m.weight)
    return x


def dirty_not_returned(m, x):
    h = m.linear(x)
    DirtyReturned.apply(h)
    return h * m.weight


def inside_no_grad(m, x):
    h = m.linear(x)
    with torch.no_grad():
        stopped = TensorAndParameter.apply(h, m.weight)
    return h + 2 * stopped


def straight_through(m, x):
    h = m.linear(x)
    return Identity.apply(h) + (torch.round(h) - h).detach()


def run_linear(linear, weight, h):
    return torch.tanh(linear(h)) * weight


def alias_of_a_parameter(m, x):
    y, weight = ReturnsParameter.apply(m.linear(x), m.weight)
    return y * weight


ACCEPTED = {
    "tensor and Parameter": lambda m, x: TensorAndParameter.apply(m.linear(x), m.weight),
    "output used only inside": used_inside,
    "identity": lambda m, x: Identity.apply(m.linear(x)) * m.weight,
    "scalars and tuples among tensors": lambda m, x: Mixed.apply(
        3, m.linear(x), 0.1, (True, False), x * m.weight, (0.5, 1e-300), True, "mean"
    ),
    "in place, mark_dirty, returned": lambda m, x: DirtyReturned.apply(m.linear(x)) * m.weight,
    "in place, mark_dirty, result not used": dirty_not_returned,
    "in place, undeclared, a copy returned": lambda m, x: UndeclaredReturned.apply(m.linear(x)) * m.weight,
    "in place, undeclared, not returned": in_place_without_mark_then_unused,
    "two outputs": lambda m, x: (lambda a, b: a * m.weight + b)(*TwoOutputs.apply(m.linear(x))),
    "int64 input as is": lambda m, x: (lambda y, i: y * m.weight + i[:, None])(*IndexAsIs.apply(m.linear(x), torch.tensor([2, 0, 2]))),
    "unused output, materialized": three(ThreeMaterialized),
    "unused output, not materialized": three(ThreeNotMaterialized),
    "module built inside forward": lambda m, x: WrapsModule.apply(m.linear(x)) * m.weight,
    "two applies on shared inputs": shared_inputs,
    "mark_dirty after in place": lambda m, x: DirtyAfterInPlace.apply(m.linear(x)) * m.weight,
    "output without grad_fn": never_backward,
    "checkpoint": lambda m, x: checkpoint(lambda h: TensorAndParameter.apply(m.linear(h), m.weight), x, use_reentrant=False),
    "saved activations, ten layers": ten_layers,
    "two classes of one name": lambda m, x: other_module.Identity.apply(Identity.apply(m.linear(x))) * m.weight,
    "a shape of its own": lambda m, x: OddShape.apply(m.linear(x) * m.weight),
    "output that aliases a Parameter": alias_of_a_parameter,
    "recompute with the RNG state": lambda m, x: Recomputes.apply(m.linear(x)) * m.weight,
}

WRONG = {
    "mark_dirty on what needs a gradient": lambda m, x: DirtyReturned.apply(x * m.weight) + m.linear(x),
    "no_grad inside a module": inside_no_grad,
    "straight-through": straight_through,
    "None for a tensor that needs a gradient": lambda m, x: NoneGradient.apply(m.linear(x), m.weight) * m.weight,
    "output is a non-contiguous view": lambda m, x: StridedOutput.apply(m.linear(x) * m.weight),
    "rank changes": lambda m, x: (lambda a, b: a.sum((0, 2)) * m.weight + b)(*RankChanges.apply(m.linear(x).sum(0))),
    "no tensor input": lambda m, x: NoTensorInput.apply(3, 0.5) * m.linear(x) * m.weight,
    "returns None": lambda m, x: ReturnsNone.apply(m.linear(x))[0] * m.weight,
    "arguments of any type": lambda m, x: (
        AnyArguments.apply(m.linear(x), ["a", "b"], {"k": (1, None)}, torch.float16, None, ((), [1.5, ("x",)])) * m.weight
    ),
    "ProcessGroup": lambda m, x: AllReduce.apply(m.linear(x), torch.distributed.group.WORLD) * m.weight,
    "reentrant checkpoint": lambda m, x: checkpoint(lambda h: TensorAndParameter.apply(m.linear(h), m.weight), x, use_reentrant=True),
}
