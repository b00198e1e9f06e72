"""Training steps of a network with operators of torch.library, beside eager PyTorch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exporter.training.loop import batches_of, eager, run, step_of
from tests.support import nodes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@torch.library.custom_op("operator_step::bent", mutates_args=())
def bent(x: Tensor, weight: Tensor, factor: float = 0.1) -> tuple[Tensor, Tensor]:
    y = torch.exp(factor * x)
    return y * weight, y.sum(1)


@bent.register_fake
def _(x, weight, factor=0.1):
    return torch.empty_like(x), x.new_empty(x.shape[0])


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx, g, h):
    """Not the derivative of what the operator computes."""
    x, weight = ctx.saved_tensors
    return -3 * g * weight + h[:, None], (2 * g * x).sum(0), None


bent.register_autograd(_backward, setup_context=_keep)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.weight, self.second = nn.Linear(4, 8), nn.Parameter(torch.rand(8)), nn.Linear(8, 3)

    def forward(self, x):
        y, total = bent(self.first(x), self.weight, factor=0.3)
        return self.second(y) * total[:, None]


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("portable", [False, True], ids=["opaque", "portable"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_three_steps_are_those_of_eager(optimizer, portable, dynamo):
    torch.manual_seed(0)
    model, batches = Net().double(), batches_of(3)
    kind, hyperparameters = OPTIMIZERS[optimizer]
    step = step_of(copy.deepcopy(model), batches[0], optimizer=optimizer, hyperparameters=hyperparameters, portable=portable, dynamo=dynamo)
    assert bool(nodes(step.model, "PythonOp")) is not portable
    losses, state = run(step, batches, allow=() if portable else ["operator_step::*"])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert losses == pytest.approx(eager(model, F.cross_entropy, kind(model.parameters(), **hyperparameters), batches), rel=1e-9)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(state[f"param.{name}"], parameter.detach().numpy(), rtol=1e-8, atol=1e-12)
        assert not torch.equal(parameter, before[name])
