"""Models whose gradients stop somewhere in them, and where."""

from __future__ import annotations

import torch
from torch import nn


class Ste(nn.Module):
    """The straight-through estimator."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        return x + (torch.round(x) - x).detach()


class NoGrad(nn.Module):
    """A block whose results are constants of the gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            scale = (y * 2).abs().amax(dim=1, keepdim=True) + 1
            scale = scale * 3
        return y / scale


class Data(nn.Module):
    """The attribute of old."""

    def forward(self, x):
        return x * torch.sigmoid(x).data


class Decorated(nn.Module):
    """no_grad as a decorator, in a submodule."""

    class Inner(nn.Module):
        @torch.no_grad()
        def forward(self, x):
            return x.mean(dim=-1, keepdim=True)

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        return x - self.inner(x)


class Gumbel(nn.Module):
    """torch.nn.functional.gumbel_softmax(hard=True) detaches inside torch's own code."""

    def forward(self, x):
        return nn.functional.gumbel_softmax(x, hard=True)


class DetachInPlace(nn.Module):
    """detach_()."""

    def forward(self, x):
        y = x * 2
        y.detach_()
        return x + y


class IntoBuffer(nn.Module):
    """An activation written into a tensor that needs no gradient."""

    def forward(self, x):
        total = torch.zeros(4)
        with torch.no_grad():
            total.add_(x.sum(dim=0))
        return x * total


class FrozenParameter(nn.Module):
    """Needs no mark: nothing that depends on it alone needs a gradient."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) @ self.frozen.weight


class Plain(nn.Module):
    """Nothing to mark: shapes, comparisons, factories and integers stop nothing."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        y = torch.where(y > 0, y, torch.zeros_like(y)) + y.new_ones(4) * y.shape[0]
        return torch.gather(y, 1, y.argmax(dim=1, keepdim=True))


# model, how many marks, the operator that each mark stands behind
STOPPED = [
    (Ste, ["Sub"]),
    (NoGrad, ["Mul"]),
    (Data, ["Sigmoid"]),
    (Decorated, ["ReduceMean"]),
    (Gumbel, ["Softmax"]),
    (DetachInPlace, ["Mul"]),
    (IntoBuffer, ["ReduceSum"]),
    (FrozenParameter, []),
    (Plain, []),
]
