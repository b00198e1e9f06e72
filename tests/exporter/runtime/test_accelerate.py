"""The door of the accelerator: what it is asked, and that everything runs without it."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

import exporter
from exporter.runtime import accelerate
from exporter.runtime.accelerate import Optimized, accelerator
from exporter.runtime.added_calls import add_call
from exporter.runtime.claims import ConvWeight, claim
from exporter.runtime.session import step_sessions
from symbolics.graph.copies import replace
from symbolics.graph.emitter import Emitter
from symbolics.graph.scope import Scope, free_prefix

X, TARGET = torch.randn(4, 3, 12, 12), torch.randint(0, 5, (4,))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.Linear(16 * 9, 5)

    def forward(self, x):
        return self.last(torch.max_pool2d(self.norm(self.conv(x)).relu(), 2).flatten(1))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def _alone(monkeypatch, guest):
    """Let a guest be the only one."""
    module = types.ModuleType("guest_of_a_test")
    module.ACCELERATOR = guest
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(accelerate, "GUESTS", [module.__name__])
    monkeypatch.delenv("PYTHONOP_ACCELERATE", raising=False)


@pytest.fixture
def guest(monkeypatch):
    """An accelerator that changes nothing, and what it was asked."""
    asked = []

    class Guest:
        library, own_gradients = None, frozenset()

        def takes(self, providers):
            return not providers

        def optimize(self, model, request, facts):
            asked.append(request)
            return Optimized(0)

    _alone(monkeypatch, Guest())
    return asked


class NumpyMish(torch.autograd.Function):
    ran = 0

    @staticmethod
    def forward(ctx, x):
        NumpyMish.ran += 1
        values = x.numpy()
        return (torch.from_numpy(values * np.tanh(np.log1p(np.exp(values)))),)


class NumpyAccelerator:
    """Computes Mish with numpy, in place of onnxruntime."""

    library, own_gradients = None, frozenset()

    def takes(self, providers):
        return not providers

    def optimize(self, model, request, facts):
        found = [node for node in model.graph if node.op_type == "Mish" and not node.domain]
        scope = Scope(free_prefix(model.graph, "numpy/"), lambda value: False)
        for node in found:
            op = Emitter(scope)
            replace(scope, node, op.nodes, add_call(op, NumpyMish, [node.inputs[0]], (), [node.outputs[0]]))
        if found:
            model.opset_imports["com.microsoft"] = 1
        return Optimized(len(found))


def test_one_that_computes_an_operator_with_numpy(monkeypatch):
    _alone(monkeypatch, NumpyAccelerator())
    monkeypatch.setattr(NumpyMish, "ran", 0)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Mish()), torch.randn(2, 3)
    loaded = exporter.load(exporter.export(model, (x,), opset_version=18), allow=[NumpyMish])
    y, expected = loaded(x), model(x)
    assert NumpyMish.ran == 1
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    expected.sum().backward()
    for ours, theirs in zip(loaded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class WeightGradient(torch.autograd.Function):
    ran = 0

    @staticmethod
    def forward(ctx, large, small, shape, stride, padding):
        WeightGradient.ran += 1
        return (torch.nn.grad.conv2d_weight(large, shape, small, stride, padding),)


class TorchAccelerator:
    """Computes the gradients of convolutions for their weights with torch: claimed by name."""

    library, own_gradients = None, frozenset(["ConvWeight"])

    def takes(self, providers):
        return not providers

    def optimize(self, model, request, facts):
        def conv_weight(op, node, facts):
            found = ConvWeight.of(node, facts)
            if found is None or found.before != found.after:
                return None
            shape = (found.outs[1], found.images[1], *found.kernel)
            return add_call(op, WeightGradient, [found.large, found.small], (shape, found.strides, found.before), node.outputs)

        claimed = claim(model, {"ConvWeight": conv_weight})
        if claimed:
            model.opset_imports["com.microsoft"] = 1
        return Optimized(claimed)


def test_one_that_claims_a_gradient_by_its_name(monkeypatch):
    _alone(monkeypatch, TorchAccelerator())
    monkeypatch.setattr(WeightGradient, "ran", 0)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, stride=2, padding=1)), torch.randn(2, 3, 9, 9)
    loaded = exporter.load(exporter.export(model, (x,), opset_version=18), allow=[WeightGradient])
    loaded(x).square().sum().backward()
    model(x).square().sum().backward()
    assert WeightGradient.ran == 2
    for ours, theirs in zip(loaded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_it_is_asked_for_each_part(net, guest):
    step = exporter.export_training_step(net, (X,), loss=nn.functional.cross_entropy, targets=(TARGET,), optimizer="sgd")
    step_sessions(step, step.layout.carried)
    loaded = exporter.load(exporter.export(net, (X,), dynamo=False))
    loaded(X).sum().backward()
    (step_asked, *others) = guest
    assert step_asked.part == "step" and step_asked.carried == step.layout.carried
    assert {request.part for request in others} == {"inference", "forward", "backward"}
    assert all(request.carried is None for request in others)


@pytest.mark.parametrize(("value", "off"), [("0", True), ("False", True), ("no", True), ("off ", True), ("", False), ("1", False)])
def test_the_variable_has_more_than_one_way_to_say_no(monkeypatch, value, off):
    monkeypatch.setenv("PYTHONOP_ACCELERATE", value)
    assert (accelerator(None) is None) is off


@pytest.mark.parametrize("way", ["argument", "environment"])
def test_without_one_a_step_is_stock_onnxruntimes(net, guest, monkeypatch, way):
    if way == "environment":
        monkeypatch.setenv("PYTHONOP_ACCELERATE", "0")
    options = {"accelerate": way != "argument"}
    step = exporter.export_training_step(
        net, (X,), loss=nn.functional.cross_entropy, targets=(TARGET,), optimizer="sgd", hyperparameters={"lr": 0.1}
    )
    trainer = exporter.Trainer(step, **options)
    loaded = exporter.load(exporter.export(net, (X,), dynamo=False), **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batch = {step.layout.inputs[0]: X, step.layout.targets[0]: TARGET}
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(X), TARGET)
        loss.backward()
        optimizer.step()
        assert trainer.step(batch) == pytest.approx(loss.item(), rel=1e-4)
    loaded.load_state_dict(net.state_dict())
    net.zero_grad()
    for module in (net, loaded):
        nn.functional.cross_entropy(module(X), TARGET).backward()
    for (name, ours), theirs in zip(loaded.named_parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert not guest


def test_whose_providers_it_takes(monkeypatch):
    monkeypatch.delenv("PYTHONOP_ACCELERATE", raising=False)
    assert accelerator(None) is not None
    assert accelerator(["CPUExecutionProvider"]) is accelerator([("CPUExecutionProvider", {})]) is accelerator(None)
    assert accelerator(["CUDAExecutionProvider", "CPUExecutionProvider"]) is None
    assert accelerator(None, accelerate=False) is None
