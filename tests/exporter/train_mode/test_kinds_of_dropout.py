"""Dropouts of all kinds, and RReLU: their masks come from the seed, a gradient has the same, and eval mode stops them."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import exporter
from tests.support import nodes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

SHAPE = (8, 16, 4, 4)
KINDS = {
    "dropout": nn.Dropout(0.3),
    "in place": nn.Dropout(0.3, inplace=True),
    "channels": nn.Dropout2d(0.3),
    "channels in place": nn.Dropout2d(0.3, inplace=True),
    "channels of 3 axes": nn.Dropout2d(0.3),
    "channels of sequences": nn.Dropout1d(0.3),
    "channels of one sequence": nn.Dropout1d(0.3),
    "channels of volumes": nn.Dropout3d(0.3),
    "alpha": nn.AlphaDropout(0.3),
    "alpha in place": nn.AlphaDropout(0.3, inplace=True),
    "alpha of channels": nn.FeatureAlphaDropout(0.3),
}
SHAPES = {
    "channels of 3 axes": SHAPE[:3],
    "channels of sequences": SHAPE[:3],
    "channels of one sequence": (32, 8),
    "channels of volumes": (8, 16, 2, 2, 2),
}


class Scaled(nn.Module):
    """A model whose gradient shows the mask: that of the weight is what the dropout's output is multiplied with."""

    def __init__(self, drop, shape, value=2.0):
        super().__init__()
        self.weight, self.drop = nn.Parameter(torch.full(shape, value)), drop

    def forward(self, x):
        return self.drop(x * self.weight)


def _total(y):
    return y.sum()


@pytest.mark.parametrize("case", KINDS)
def test_a_step_draws_by_its_seed_and_goes_on_to_the_same_bits(case, dynamo, caplog):
    model, x = Scaled(KINDS[case], SHAPES.get(case, SHAPE)).train(), torch.ones(SHAPES.get(case, SHAPE))
    step = exporter.export_training_step(
        model, (x,), loss=_total, optimizer="sgd", hyperparameters={"lr": 1.0}, output_names=["y"], dynamo=dynamo
    )
    assert "seed" in step.initial
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING and "Evaluation failed" in record.message]
    trainer = exporter.Trainer(step)
    trainer.step({"x": x})
    y, gradient = trainer.outputs["y"], 2.0 - trainer.state_dict()["weight"]
    expected = Scaled(KINDS[case], x.shape)
    value = expected(x)
    value.sum().backward()
    torch.testing.assert_close(y.unique(), value.detach().unique())
    torch.testing.assert_close(gradient.unique(), expected.weight.grad.unique(), rtol=1e-6, atol=1e-6)
    kept = gradient.abs() > 1e-3
    assert torch.equal(kept, y == y.max())
    assert 0.6 < kept.float().mean() < 0.8
    if "channels" in case:
        whole = kept.unsqueeze(0) if case == "channels of one sequence" else kept
        assert torch.equal(whole, whole.flatten(2)[:, :, :1].reshape(*whole.shape[:2], *[1] * (whole.dim() - 2)).expand_as(whole))
    saved = trainer.save()
    losses = [trainer.step({"x": x}) for _ in range(2)]
    assert losses[0] != losses[1]
    other = exporter.Trainer(step)
    other.restore(saved)
    assert [other.step({"x": x}) for _ in range(2)] == losses


@pytest.mark.parametrize("case", [*KINDS, "all", "all of alpha", "rrelu", "rrelu in place"])
def test_eval_mode_stops_it(case, dynamo):
    drop = {"all": nn.Dropout2d(1.0), "all of alpha": nn.AlphaDropout(1.0), "rrelu": nn.RReLU(), "rrelu in place": nn.RReLU(inplace=True)}
    model = Scaled({**KINDS, **drop}[case], SHAPES.get(case, SHAPE), -2.0).train()
    x = torch.randn(SHAPES.get(case, SHAPE))
    module = exporter.load(exporter.export(model, (x,), dynamo=dynamo)).train()
    first, second = module(x), module(x)
    if case.startswith("all"):
        assert not first.any()
    else:
        assert not torch.equal(first, second)
    torch.testing.assert_close(module.eval()(x), model.eval()(x))


def test_rrelu_draws_slopes_between_its_bounds(dynamo):
    model, x = Scaled(nn.RReLU(0.1, 0.4), (64, 64), 1.0).train(), torch.randn(64, 64)
    module = exporter.load(exporter.export(model, (x,), dynamo=dynamo)).train()
    y = module(x)
    y.sum().backward()
    slopes = (y / x)[x < 0]
    assert torch.equal(y[x >= 0], x[x >= 0])
    assert (slopes.min() >= 0.1, slopes.max() <= 0.4) == (True, True)
    torch.testing.assert_close(slopes.mean(), torch.tensor(0.25), atol=0.01, rtol=0)
    torch.testing.assert_close(next(iter(module.parameters())).grad, y.detach())


@pytest.mark.parametrize("inplace", [False, True])
def test_rrelu_in_eval_mode(inplace, dynamo):
    model, x = Scaled(nn.RReLU(0.1, 0.4, inplace=inplace), (3, 4)).eval(), torch.randn(3, 4)
    torch.testing.assert_close(exporter.load(exporter.export(model, (x,), dynamo=dynamo))(x), model(x))


def test_open_sizes(dynamo):
    model, x = nn.Sequential(nn.Dropout2d(0.5), nn.AlphaDropout(0.5)).train(), torch.ones(4, 8, 6, 6)
    program = exporter.export(model, (x,), dynamo=dynamo, dynamic_shapes=({0: "batch", 2: "height"},))
    assert len(nodes(program.model, "Dropout")) == 2
    module, other = exporter.load(program).eval(), torch.randn(7, 8, 3, 6)
    torch.testing.assert_close(module(other), other)
    assert module.train()(other).shape == other.shape


@pytest.mark.parametrize("case", ["channels", "alpha of channels", "in place"])
def test_verify_gives_eager_the_same_masks(case, dynamo):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), KINDS[case]).train()
    report = exporter.verify(model, (torch.randn(4, 3, 8, 8),), dynamo=dynamo)
    assert report.ok, report
