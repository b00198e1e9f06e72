"""Statistics inside a checkpoint: eager moves them twice a step, the file once, and both the export and verify say so."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import exporter


class Net(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.behind = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.BatchNorm1d(3)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.behind(x)


def said(model, dynamo):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exporter.export(model, (torch.randn(6, 3),), dynamo=dynamo)
    return [str(one.message) for one in caught if "torch.utils.checkpoint: eager's backward" in str(one.message)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_export_names_them(reentrant, dynamo):
    (text,) = said(Net(reentrant).train(), dynamo)
    assert "'inner.1.running_mean', 'inner.1.running_var', 'inner.1.num_batches_tracked' inside" in text


class Decays(nn.Linear):
    """Changes its weight at each call."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


def test_the_export_names_a_parameter_that_changes(dynamo):
    model = Net(False).train()
    model.inner[0] = Decays(3, 3)
    (text,) = said(model, dynamo)
    assert "'inner.0.weight', 'inner.1.running_mean'" in text


class Again(torch.autograd.Function):
    """A checkpoint of its own, as packages of reversible nets have one."""

    @staticmethod
    def forward(ctx, x, module, *parameters):
        ctx.module, ctx.x = module, x.detach()
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            y = ctx.module(x)
        found = torch.autograd.grad(y, [x, *ctx.module.parameters()], grad)
        return found[0], None, *found[1:]


class Recomputing(Net):
    def forward(self, x):
        return self.behind(Again.apply(x, self.inner, *self.inner.parameters()))


@pytest.mark.filterwarnings("ignore:.*Again:")
def test_a_checkpoint_of_a_package_is_one(dynamo):
    with pytest.warns(
        exporter.PythonopWarning, match=r"'inner\.1\.num_batches_tracked' inside \S+:Again: where its backward runs that part again"
    ):
        exporter.export(Recomputing(None).train(), (torch.randn(6, 3),), dynamo=dynamo)


@pytest.mark.parametrize("model", [Net(None).train(), Net(False).eval()], ids=["no checkpoint", "eval"])
def test_nothing_is_said_otherwise(model, dynamo):
    assert not said(model, dynamo)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.usefixtures("quick_verify")
@pytest.mark.filterwarnings("ignore:forward changes 'inner")
def test_verify_compares_what_a_step_leaves():
    report = exporter.verify(Net(False).train(), (torch.randn(6, 3),), steps=1)
    assert {row.name for row in report.rows if not row.ok and row.kind == "buffer"} == {
        "inner.1.running_mean", "inner.1.running_var", "inner.1.num_batches_tracked",
    }  # fmt: skip
