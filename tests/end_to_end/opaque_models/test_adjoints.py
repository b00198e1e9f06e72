"""The adjoint solvers of torchdiffeq and torchode, with adaptive steps: their own gradients in the file, in a loaded module and in a training step."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

import exporter
from tests.end_to_end.opaque_models.rows import imported
from tests.support import missing
from tests.trains import assert_three_train_alike

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, t, y):
        return torch.tanh(self.linear(y)) * (1 + t.reshape(-1, 1) if t.dim() else 1 + t)


class Torchdiffeq(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.field = nn.Linear(5, 3), Field()

    def forward(self, x):
        library = imported("torchdiffeq")
        return library.odeint_adjoint(self.field, self.first(x), torch.linspace(0, 1, 3), rtol=1e-5, atol=1e-6)[-1]


class Solve(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = Field()

    def forward(self, y):
        to = imported("torchode")
        term = to.ODETerm(self.field)
        problem = to.InitialValueProblem(y0=y, t_eval=torch.linspace(0, 1, 3).expand(len(y), 3))
        solver = to.BacksolveAdjoint(term, to.Tsit5(), to.IntegralController(1e-6, 1e-5))
        return solver.solve(problem).ys[:, -1]


class Torchode(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.solve = nn.Linear(5, 3), Solve()

    def forward(self, x):
        return self.solve(self.first(x))


CASES = {
    "torchdiffeq": (Torchdiffeq, ["torchdiffeq:odeint_adjoint"], ["torchdiffeq._impl.adjoint:odeint_adjoint", f"{__name__}:Field"]),
    "torchode": (Torchode, [f"{__name__}:Solve"], [f"{__name__}:*"]),
}


@pytest.mark.parametrize("name", CASES)
def test_as_eagers_adjoint(name: str, dynamo: bool) -> None:
    if importlib.util.find_spec(name) is None:
        missing("opaque_models", f"{name} is not installed: make test-opaque-models")
    make, opaque, allow = CASES[name]
    torch.manual_seed(0)
    model, x, target = make(), torch.randn(4, 5), torch.randn(4, 3)
    options = {"dynamo": dynamo, "opaque": opaque}
    report = exporter.verify(model, (x,), steps=1, **options)
    assert report.ok, report
    assert_three_train_alike(model, x, target, torch.optim.SGD, 1e-2, steps=2, rtol=1e-3, allow=allow, **options)
