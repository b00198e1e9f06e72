"""Rows of the ctx API. No backward is the derivative of its forward: a lost backward shows."""

from __future__ import annotations

import torch
from torch.amp import custom_bwd, custom_fwd
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tests.end_to_end.functions.case import case


class Apply(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 5


@case()
def apply(m, x):
    return Apply.apply(x * m.weight) + 1


class Dirty(Function):
    @staticmethod
    def forward(ctx, x, amount):
        x.add_(amount)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 3, None


class DirtyUsed(Function):
    """Its input is dirty, its output is another tensor."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x, x.sin()

    @staticmethod
    def backward(ctx, g, gs):
        return g * 3 + gs * 7


@case()
def dirty_activation(m, x):
    h = x * m.weight
    Dirty.apply(h, 2.0)
    return h * m.weight


@case()
def dirty_activation_and_output(m, x):
    h = x * m.weight
    y, z = DirtyUsed.apply(h)
    return y + z + h


@case()
def dirty_input(m, x):
    y = Dirty.apply(x, 2.0)
    return y * m.weight + x


@case(state=lambda: {"buffer": torch.arange(4.0)})
def dirty_buffer(m, x):
    return Dirty.apply(m.buffer, 2.0) * m.weight + x + m.buffer


@case()
def dirty_view(m, x):
    h = x * m.weight
    Dirty.apply(h[:1], 2.0)
    return h * m.weight


class NonDifferentiable(Function):
    @staticmethod
    def forward(ctx, x):
        mask = (x > 0).to(x.dtype)
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        return x * mask, mask

    @staticmethod
    def backward(ctx, g, gm):
        assert not gm.any()
        return 3 * g * ctx.saved_tensors[0]


@case()
def mark_non_differentiable(m, x):
    y, mask = NonDifferentiable.apply(x * m.weight)
    return y * 2, mask


class SaveInputs(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 3 * g * w, (5 * g * x).sum(0)


@case()
def save_inputs(m, x):
    return SaveInputs.apply(x + 1, m.weight)


class SaveOutputs(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (2 - y * y)


@case()
def save_outputs(m, x):
    return SaveOutputs.apply(x * m.weight)


class SaveIntermediates(Function):
    @staticmethod
    def forward(ctx, x):
        mean = x.mean(-1, keepdim=True)
        ctx.save_for_backward(x - mean, mean)
        return (x - mean).square()

    @staticmethod
    def backward(ctx, g):
        centred, mean = ctx.saved_tensors
        return g * centred + mean


@case()
def save_intermediates(m, x):
    return SaveIntermediates.apply(x * m.weight)


class SaveNone(Function):
    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias, None)
        return x * 2 if bias is None else x * 2 + bias

    @staticmethod
    def backward(ctx, g):
        x, bias, nothing = ctx.saved_tensors
        assert nothing is None
        return g * x, None if bias is None else g.sum(0)


@case()
def save_none(m, x):
    return SaveNone.apply(x * m.weight, None) + SaveNone.apply(x, m.weight)


class ForwardMode(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_forward(x)
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def jvp(ctx, t):
        (x,) = ctx.saved_for_forward
        return t * x.exp()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


@case()
def save_for_forward_and_jvp(m, x):
    return ForwardMode.apply(x * m.weight)


class NamedVjp(Function):
    """backward under its newer name."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def vjp(ctx, g):
        return g * ctx.saved_tensors[0]


@case()
def vjp(m, x):
    return NamedVjp.apply(x * m.weight)


class NotMaterialized(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 5

    @staticmethod
    def backward(ctx, a, b):
        assert b is None
        return a * 100


@case()
def set_materialize_grads(m, x):
    return NotMaterialized.apply(x * m.weight)[0]


class Materialized(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x[:, :2] * 5

    @staticmethod
    def backward(ctx, a, b):
        assert b.shape == (a.shape[0], 2) and not b.any()
        return a * 100


@case()
def materialized_zeros(m, x):
    return Materialized.apply(x * m.weight)[0]


class NeedsInputGrad(Function):
    @staticmethod
    def forward(ctx, x, w, factor):
        assert not ctx.needs_input_grad[2]
        ctx.save_for_backward(x, w)
        ctx.at_forward = ctx.needs_input_grad
        return x * w * factor

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        assert ctx.at_forward == ctx.needs_input_grad == (True, False, False)
        return 3 * g * w if ctx.needs_input_grad[0] else None, (g * x).sum(0) if ctx.needs_input_grad[1] else None, None


@case(state=lambda: {"frozen": torch.nn.Parameter(torch.rand(4), requires_grad=False)})
def needs_input_grad(m, x):
    return NeedsInputGrad.apply(x * m.weight, m.frozen, 2)


class TensorAttribute(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x, ctx.double = x, x * 2
        return ctx.double.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.x + ctx.double


@case()
def tensor_attributes(m, x):
    return TensorAttribute.apply(x * m.weight)


class Notes:
    def __init__(self, factor):
        self.factor = factor


class ObjectAttribute(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.notes = Notes(7)
        ctx.shape, ctx.fn = x.shape, torch.cos
        return x.view(-1).sin()

    @staticmethod
    def backward(ctx, g):
        return ctx.fn(g).view(ctx.shape) * ctx.notes.factor


@case()
def object_attributes(m, x):
    return ObjectAttribute.apply(x * m.weight)


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 7

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return torch.from_numpy(g.numpy() * 3)


@case()
def once_differentiable_backward(m, x):
    return Once.apply(x * m.weight)


class Setup(Function):
    @staticmethod
    def forward(x, w, power=2):
        return x**power * w, x.sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w, ctx.power = inputs
        assert output[1].dim() == 0
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx, g, s):
        x, w = ctx.saved_tensors
        return g * ctx.power * w + s, (g * x).sum(0), None


@case()
def setup_context(m, x):
    y, s = Setup.apply(x, m.weight)
    return y + s + Setup.apply(x, m.weight, power=3)[0]


class VmapRule(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


@case()
def generate_vmap_rule(m, x):
    return VmapRule.apply(x * m.weight)


class Custom(Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, g):
        assert torch.is_autocast_enabled("cpu")
        a, b = ctx.saved_tensors
        return 3 * (g.to(b.dtype) @ b.t()).to(a.dtype), a.t().to(g.dtype) @ g


class CustomCast(Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        assert not torch.is_autocast_enabled("cpu")
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0]


@case(state=lambda: {"matrix": torch.nn.Parameter(torch.rand(4, 4))}, loose=2e-2)
def custom_fwd_and_bwd_under_autocast(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = Custom.apply(x * m.weight, m.matrix)
    return y.float()


@case()
def custom_fwd_casts_inputs(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = CustomCast.apply(x * m.weight)
    return y * 2


@case()
def saved_tensor_hooks(m, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return SaveInputs.apply(x + 1, m.weight)
