"""What no file may import: nothing of this module is ever allowed."""

from __future__ import annotations

import dataclasses

from torch.autograd import Function


class Identity(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g


@dataclasses.dataclass
class Config:
    size: int = 1
