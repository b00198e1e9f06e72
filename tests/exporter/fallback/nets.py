"""Models that stand in the way of an exporter, and what the tests ask of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import exporter
from exporter.errors import PythonopWarning
from tests.end_to_end.no_exporter.models import Branch, Part


class Solve(Part):
    def forward(self, x):
        return torch.linalg.solve(self.linear(x) + 3 * torch.eye(4), x)


class Remembers(Part):
    """Buffers, lists, dropout: all that a try may change."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.seen = nn.BatchNorm1d(4), nn.Dropout(0.5), [1]
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        y = self.drop(self.norm(self.linear(x)))
        self.count += 1
        return y * 2 if y.sum() > 0 else y


class Unhashable(Part):
    """torch.export has a symbol for the open size."""

    def forward(self, x):
        return self.linear(x) * len({x.shape[0]})


class Handle:
    def __reduce__(self):
        raise TypeError("a handle of C++")


class Held(Branch):
    def __init__(self):
        super().__init__()
        self.handle = Handle()


class NoDerivative(Part):
    def forward(self, x):
        return torch.unique_consecutive((self.linear(x) * 8).round(), dim=0).sum(0)


class Net(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.first, self.parts = nn.Linear(4, 4), nn.Sequential(*parts)

    def forward(self, x):
        return self.parts(self.first(x).tanh()) * 2


def taken(model, x, **options):
    with pytest.warns(PythonopWarning, match="fallback=True took") as said:
        program = exporter.export(model, (x,), fallback=True, **options)
    assert sum("fallback=True" in str(each.message) for each in said) == 1
    return program


def named(cls):
    return f'"{cls.__module__}:{cls.__name__}"'


def state(model):
    tensors = {name: (id(each), each.detach().clone()) for name, each in (*model.named_parameters(), *model.named_buffers())}
    gradients = {name: id(parameter.grad) for name, parameter in model.named_parameters()}
    own = {path: {key: id(value) for key, value in vars(module).items()} for path, module in model.named_modules()}
    return tensors, gradients, own, list(model.parts[0].seen)


def generators():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
