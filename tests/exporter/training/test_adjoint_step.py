"""Solvers whose gradient is an adjoint method of their own, by `opaque=`: a training step and a loaded module move as eager does."""

from __future__ import annotations

import copy

import pytest
import torch

import exporter
from tests.zoo import modules as M

FUNCTIONS = ["tests.zoo.modules:solve", "tests.zoo.modules:blend"]


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_an_adjoint_that_takes_a_module_and_a_loop_around_it(dynamo):
    torch.manual_seed(0)
    model, x, target = M.Solves(), torch.randn(6, 4), torch.randn(6, 4)
    loss, opaque = torch.nn.functional.mse_loss, FUNCTIONS
    step = exporter.export_training_step(model, (x,), loss=loss, targets=(target,), optimizer="adamw", dynamo=dynamo, opaque=opaque)
    trainer = exporter.Trainer(step, allow=FUNCTIONS)
    loaded = exporter.load(exporter.export(copy.deepcopy(model), (x,), dynamo=dynamo, opaque=opaque), allow=FUNCTIONS)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, loaded)]
    for _ in range(3):
        trainer.step({"x": x, "target": target})
        for module, optimizer in zip((model, loaded), optimizers, strict=True):
            optimizer.zero_grad()
            loss(module(x), target).backward()
            optimizer.step()
        gradients = [{name: parameter.grad for name, parameter in module.named_parameters()} for module in (loaded, model)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(torch.as_tensor(trainer.state_dict()[name]), value, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=1e-4, atol=1e-5)
