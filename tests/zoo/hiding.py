"""Functions that take modules among their arguments and answer for their parameters: reversible blocks, adjoint solvers."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

__all__ = ["AdjointNet", "EulerAdjoint", "Recomputes", "Reversible", "ReversibleNet"]


class Recomputes(Function):
    """A checkpoint whose gradients are three times those of the module that it runs, so that a lost backward shows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            torch.autograd.backward(ctx.module(leaf), 3 * grad)
        return leaf.grad, None


class Reversible(Function):
    """RevNet's block: the backward computes the inputs again, and adds to the parameters' .grad itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: nn.Module, g: nn.Module) -> torch.Tensor:
        ctx.f, ctx.g = f, g
        x1, x2 = x.chunk(2, -1)
        with torch.no_grad():
            y1 = x1 + f(x2)
            y2 = x2 + g(y1)
        y = torch.cat([y1, y2], -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        y1, y2 = y.chunk(2, -1)
        d1, d2 = grad.chunk(2, -1)
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            made = ctx.g(y1)
            torch.autograd.backward(made, d2)
        d1, x2 = d1 + y1.grad, y2 - made.detach()
        with torch.enable_grad():
            x2 = x2.requires_grad_()
            torch.autograd.backward(ctx.f(x2), d1)
        return torch.cat([d1, d2 + x2.grad], -1), None, None


class ReversibleNet(nn.Module):
    """Two reversible blocks of width 8."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)]) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) -> (batch, 2)."""
        for f, g in self.blocks:
            x = Reversible.apply(x, f, g)
        return self.head(x)


class EulerAdjoint(Function):
    """Euler's method, and the adjoint equation run backwards: as torchdiffeq's odeint_adjoint, its gradients are not those of the forward."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, y: torch.Tensor, times: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.field = field
        with torch.no_grad():
            for start, end in itertools.pairwise(times):
                y = y + (end - start) * field(start, y)
        ctx.save_for_backward(y, times, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, adjoint: torch.Tensor) -> Any:
        y, times, *parameters = ctx.saved_tensors
        gradients = [torch.zeros_like(p) for p in parameters]
        for start, end in zip(times[:-1].flip(0), times[1:].flip(0), strict=True):
            step = end - start
            with torch.enable_grad():
                leaf = y.detach().requires_grad_()
                slope = ctx.field(end, leaf)
                of_y, *of_parameters = torch.autograd.grad(slope, (leaf, *parameters), adjoint)
            y, adjoint = y - step * slope.detach(), adjoint + step * of_y
            gradients = [total + step * part for total, part in zip(gradients, of_parameters, strict=True)]
        return None, adjoint, None, *gradients


class _Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, time: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(y)) * (1 + time)


class AdjointNet(nn.Module):
    """A neural differential equation over [0, 1] in five steps."""

    def __init__(self) -> None:
        super().__init__()
        self.field = _Field()
        self.register_buffer("times", torch.linspace(0, 1, 6))
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 3) -> (batch, 2)."""
        return self.head(EulerAdjoint.apply(self.field, x, self.times, *self.field.parameters()))
