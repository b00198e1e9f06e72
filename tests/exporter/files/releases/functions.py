"""What the files of old releases name, and the models that they are of. What stands here stays as it is; a release may add to it."""

from __future__ import annotations

import torch

__all__ = ["Block", "Model", "Quantised", "Scaled", "Sorted", "batch"]


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


def _fill(model: torch.nn.Module) -> None:
    """Weights that need no file."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.6, 0.8, parameter.numel()).reshape(parameter.shape))


class Block(torch.nn.Module):
    """A module that stays one node: what it does depends on values, so that no graph can stand for it. Since 0.2.0."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.register_buffer("offset", torch.linspace(0, 1, 4))

    def forward(self, x):
        y = self.linear(x) + self.offset
        return y * 2 if float(y.detach().sum()) > 0 else y


class Sorted(torch.nn.Module):
    """A `Block`, and behind it what ONNX can say. Since 0.2.0."""

    def __init__(self):
        super().__init__()
        self.block, self.outer = Block(), torch.nn.Linear(4, 2)
        _fill(self)

    def forward(self, x):
        return self.outer(self.block(x).tanh())


class Quantised(torch.nn.Module):
    """Two linear layers with fake-quantised weights and activations of 8 bits. Since 0.2.0."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        _fill(self)
        self.eval()

    def forward(self, x):
        for layer in (self.inner, self.outer):
            weight = torch.fake_quantize_per_tensor_affine(layer.weight, 1 / 127, 0, -127, 127)
            x = torch.nn.functional.linear(torch.fake_quantize_per_tensor_affine(x, 0.02, 128, 0, 255), weight, layer.bias)
        return torch.fake_quantize_per_tensor_affine(x, 0.02, 128, 0, 255)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch, and targets."""
    return torch.linspace(-1, 1, 15).reshape(5, 3), torch.linspace(0.5, -0.5, 10).reshape(5, 2)
