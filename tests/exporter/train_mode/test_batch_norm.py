"""BatchNorm that trains in a loaded file, once its running statistics are no longer finite."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import exporter
from exporter.training.trainer import Trainer
from symbolics.errors import RunError


class Twice(nn.Module):
    """One module, two calls: the second follows the first's statistics."""

    def __init__(self, momentum):
        super().__init__()
        self.norm = nn.BatchNorm2d(2, momentum=momentum)

    def forward(self, x):
        return self.norm(self.norm(x).exp() * x).sin()


@pytest.mark.parametrize("momentum", [0.1, None], ids=["share", "average"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=["inf", "nan"])
def test_one_bad_batch_spoils_the_buffers_and_no_later_gradient(momentum, bad):
    torch.manual_seed(0)
    model = Twice(momentum)
    loaded = exporter.load(exporter.export(copy.deepcopy(model), (torch.randn(3, 2, 4, 4),), dynamo=False)).train()
    for spoiled in (False, True, False, False):
        x = torch.randn(3, 2, 4, 4)
        if spoiled:
            x[0, 1, 0, 0] = bad
        results = []
        for module in (model, loaded):
            v = x.clone().requires_grad_()
            y = module(v)
            (grad,) = torch.autograd.grad(y.square().sum(), v)
            results.append([y.detach(), grad, *(module.get_buffer(f"norm.running_{name}").clone() for name in ("mean", "var"))])
        torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3, equal_nan=True)
        assert bool(results[1][1].isfinite().all()) is not spoiled


def _dynamic(model):
    x, target = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)
    batch = {0: torch.export.Dim.DYNAMIC}
    step = exporter.export_training_step(
        model, (x,), loss=nn.functional.cross_entropy, targets=(target,), optimizer="sgd", dynamic_shapes=(batch, batch)
    )
    return exporter.load(exporter.export(model, (x,), dynamic_shapes=(batch,))).train(), step


def test_a_batch_of_one_is_an_error_as_in_eager():
    """The last of a DataLoader: its variance would be NaN for ever after."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    loaded, step = _dynamic(model)
    x = torch.randn(1, 4)
    with pytest.raises(ValueError, match="more than 1 value"):
        model(x)
    before = {key: value.clone() for key, value in loaded.state_dict().items()}
    with pytest.raises(RunError, match=r"1\.running_var.*shape \[1, 4\] has one value.*drop_last"):
        loaded(x)
    for key, value in loaded.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    trainer = Trainer(step)
    names = (*trainer.layout.inputs, *trainer.layout.targets)
    with pytest.raises(Exception, match=r"1\.running_var.*has one value.*drop_last"):
        trainer.step(dict(zip(names, (x, torch.zeros(1, dtype=torch.long)), strict=True)))
    trainer.step(dict(zip(names, (torch.randn(2, 4), torch.zeros(2, dtype=torch.long)), strict=True)))
    assert trainer.state_dict()["1.running_var"].isfinite().all()


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("momentum", [0.1, None], ids=["share", "average"])
def test_a_count_of_one_element_is_a_count(momentum, dynamo):
    """As quantisers and old checkpoints have it: a tensor of shape [1]."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum)), torch.randn(6, 3)
    model[1].num_batches_tracked = torch.zeros(1, dtype=torch.long)
    loaded = exporter.load(exporter.export(model, (x,), dynamo=dynamo))
    for _ in range(3):
        x = torch.randn(6, 3)
        torch.testing.assert_close(loaded(x), model(x))
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(loaded.get_buffer(name), buffer)
