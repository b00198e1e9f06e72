"""One model with parameters and buffers of every kind."""

from __future__ import annotations

import torch
from torch import nn

from tests.symbolics.capture.functions import Scale


class Everything(nn.Module):
    """What optimizers like to fold: equal values, transposes, ties, unused names, all kinds of buffers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.twin = nn.Linear(4, 4)
        self.twin.load_state_dict(self.first.state_dict())  # equal bits, not tied
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.matrix = nn.Parameter(torch.rand(4, 4))
        self.product = nn.ParameterList([torch.rand(4, 4), torch.rand(4, 4)])
        self.unused = nn.Parameter(torch.rand(3))
        self.frozen = nn.Parameter(torch.rand(4), requires_grad=False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("kept", torch.arange(4.0))
        self.register_buffer("passing", torch.arange(4.0) + 10, persistent=False)

    def forward(self, x):
        x = self.tied(self.twin(self.first(x))) @ self.matrix.T
        x = self.norm(x) @ (self.product[0] @ self.product[1])
        return Scale.apply(x, self.frozen, 2.0) + self.kept + self.passing + torch.arange(4.0) * 2
