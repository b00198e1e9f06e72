"""Functions and models of the export tests; importable, so that a fresh process finds them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class Scale(torch.autograd.Function):
    """x * weight * factor; its backward is not the derivative, so a lost backward shows."""

    @staticmethod
    def forward(ctx, x, weight, factor=1.0):
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return x * weight * factor

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 3 * grad * weight * ctx.factor, (5 * grad * x * ctx.factor).sum_to_size(weight.shape), None


class NumpyGelu(torch.autograd.Function):
    """Forward in numpy: torch.export cannot trace it, torch.jit.trace makes it one Constant."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        array = x.detach().cpu().numpy()
        return torch.from_numpy((array * 0.5 * (1 + np.tanh(array))).astype(array.dtype))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x


class NumpyPairs(torch.autograd.Function):
    """(n, d) -> (2 n - 1, d) and (n, n), in numpy."""

    @staticmethod
    def forward(ctx, x):
        array = x.detach().numpy()
        middle = (array[1:] + array[:-1]) / 2
        return torch.from_numpy(np.concatenate([array, middle])), torch.from_numpy(array @ array.T)

    @staticmethod
    def backward(ctx, a, b):
        raise NotImplementedError


class NonZero(torch.autograd.Function):
    """A size that only data knows, in torch and in numpy."""

    @staticmethod
    def forward(ctx, x, through_numpy):
        if through_numpy:
            return torch.from_numpy(x.detach().numpy()[x.detach().numpy() > 0])
        return x[x > 0]

    @staticmethod
    def backward(ctx, grad):
        return None, None


class TakeRows(torch.autograd.Function):
    """Takes a size as an argument."""

    @staticmethod
    def forward(ctx, x, rows, more=(1,)):
        assert isinstance(rows, int)
        return x[:rows] * rows

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


class Concat(torch.autograd.Function):
    """Tensors in a list and a dict, None, str."""

    @staticmethod
    def forward(ctx, tensors, named, extra, mode="cat", bias=None):
        assert mode == "side by side" and named["b"] == 3 and bias is None
        return torch.cat([*tensors, named["a"], extra], dim=-1)

    @staticmethod
    def backward(ctx, grad):
        return None, None, grad[..., -4:], None, None


class Halves(torch.autograd.Function):
    """Two outputs and an integer one, and None."""

    @staticmethod
    def forward(ctx, x):
        index = torch.arange(x.shape[0])
        ctx.mark_non_differentiable(index)
        return x / 2, index, None, x * 2

    @staticmethod
    def backward(ctx, a, _index, _none, b):
        return a / 2 + b * 2


class AddInPlace(torch.autograd.Function):
    """mark_dirty."""

    @staticmethod
    def forward(ctx, x, amount):
        x.add_(amount)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Sneaky(torch.autograd.Function):
    """Changes its input and says nothing."""

    @staticmethod
    def forward(ctx, x):
        x.add_(1)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Boom(torch.autograd.Function):
    """Raises."""

    @staticmethod
    def forward(ctx, x):
        raise ValueError("no such thing as a forward")

    @staticmethod
    def backward(ctx, grad):
        return grad


class WithSymbolic(torch.autograd.Function):
    """Has a symbolic of its own."""

    @staticmethod
    def symbolic(g, x):
        return g.op("Softsign", x)

    @staticmethod
    def forward(ctx, x):
        return torch.nn.functional.softsign(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Setup(torch.autograd.Function):
    """The setup_context style."""

    @staticmethod
    def forward(x, power=2):
        return x**power

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Call(nn.Module):
    """A module around one expression."""

    def __init__(self, function, **tensors):
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, *args):
        return self.function(self, *args)


class Mlp(nn.Module):
    """Linear, a Function with a Parameter, Linear."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.rand(4) + 0.5)
        self.second = nn.Linear(4, 3)

    def forward(self, x):
        return self.second(torch.tanh(Scale.apply(self.first(x), self.weight, 0.1)))


def asserts(x):
    """Here, for pytest writes the asserts of its tests anew."""
    assert x.sum() < 1e6 and not torch.any(x > 1e6), "too large"
    return x * 2


class Mapped(torch.autograd.Function):
    """Under torch.func.vmap, torch maps its forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.exp() * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.exp() * (x + 1)


class Flagged(torch.autograd.Function):
    """A setting that only a keyword could name, which apply does not hand on: its default holds. Beside its result it returns numbers."""

    @staticmethod
    def forward(ctx, x, *, times=3, offset=1.0):
        ctx.times = times
        return x * times + offset, 7, {"offset": offset}

    @staticmethod
    def backward(ctx, g, *_):
        return 2 * ctx.times * g
