"""State is what a forward reads before it writes it: that is carried as eager has it, and what is only written is no output, no input, no obstacle."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F

import exporter
from exporter import errors
from exporter.training.step import export_training_step
from symbolics.node.metadata import changes_of, results_of
from tests.exporter.train_mode.writing import BATCH, STATE, WRITTEN, Written, read_in_evaluation
from tests.exporter.training.loop import eager, run

ALLOW = ["tests.exporter.train_mode.writing:*"]
WRITTEN_NAMES = {f"parts.{step.__name__}.b" for step in WRITTEN}
STATE_NAMES = {f"parts.{step.__name__}.b" for step in STATE}


def _model(*steps):
    torch.manual_seed(0)
    return Written(*steps)


def _batches(count=2):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(BATCH, generator=generator), torch.randn(BATCH, generator=generator)) for _ in range(count)]


def _buffers(module):
    return {name: value.detach().clone() for name, value in module.named_buffers()}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dynamo", [True, False])
def test_two_calls_are_as_in_eager(dynamo, training):
    model, batches = _model().train(training), _batches()
    before = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.PythonopWarning)
        program = exporter.export(model, batches[0][:1], dynamo=dynamo)
    assert model.state_dict().keys() == before.state_dict().keys()
    assert all(torch.equal(value, before.state_dict()[name]) for name, value in model.state_dict().items())
    changes = changes_of(program.model)
    state = STATE_NAMES if training else STATE_NAMES - {f"parts.{read_in_evaluation.__name__}.b"}
    assert set(changes.carried) == state
    assert not changes.lost
    assert len(results_of(program.model)) == 1
    module = exporter.load(program, allow=ALLOW).train(training)
    at_export = _buffers(module)
    for x, _ in batches:
        one, two = (x.clone().requires_grad_() for _ in range(2))
        expected, found = model(one), module(two)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            torch.autograd.grad(found.sum(), two)[0], torch.autograd.grad(expected.sum(), one)[0], rtol=1e-4, atol=1e-5
        )
        now, wanted = _buffers(module), _buffers(model)
        for name in STATE_NAMES:
            torch.testing.assert_close(now[name], wanted[name], rtol=1e-5, atol=1e-5, msg=name)
        for name in WRITTEN_NAMES:
            assert torch.equal(now[name], at_export[name]), name


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_training_step(dynamo):
    model, batches = _model().train(), _batches()
    step = export_training_step(
        model, batches[0][:1], loss=F.mse_loss, targets=batches[0][1:], optimizer="sgd", hyperparameters={"lr": 0.05}, dynamo=dynamo
    )
    assert set(step.layout.buffers) == STATE_NAMES
    losses, state = run(step, batches, allow=ALLOW)
    assert losses == pytest.approx(eager(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.05), batches), rel=1e-5)
    for key, name in step.layout.buffers.items():
        torch.testing.assert_close(torch.as_tensor(state[name]), _buffers(model)[key], rtol=1e-5, atol=1e-5, msg=key)
