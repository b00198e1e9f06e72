"""What the files of old releases name, and the model that they are of. It stays as it is."""

from __future__ import annotations

import torch

__all__ = ["Model", "Scaled", "batch"]


class Scaled(torch.autograd.Function):
    """x**2 * scale + shift, with a backward of its own that is not the derivative: it counts the second order by a factor."""

    @staticmethod
    def forward(ctx, x, scale, shift=None, *, power=2):
        ctx.save_for_backward(x)
        ctx.scale = scale
        y = x**power * scale
        return y if shift is None else y + shift

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x * ctx.scale, None, g.sum(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        self.shift = torch.nn.Parameter(torch.empty(4))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-0.6, 0.8, parameter.numel()).reshape(parameter.shape))

    def forward(self, x):
        return self.outer(Scaled.apply(self.inner(x).tanh(), 0.5, self.shift))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch, and targets."""
    return torch.linspace(-1, 1, 15).reshape(5, 3), torch.linspace(0.5, -0.5, 10).reshape(5, 2)
