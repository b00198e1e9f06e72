"""Portable Functions of several inputs, and any of their gradients asked for: calls of functions whose last outputs nobody reads."""

from __future__ import annotations

import copy
import functools
import itertools

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import exporter
from symbolics.node.metadata import pairing_of


class Mixed(torch.autograd.Function):
    """One to four inputs; its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, *xs):
        ctx.save_for_backward(*xs)
        return functools.reduce(torch.mul, xs), xs[0].sin()

    @staticmethod
    def backward(ctx, g, h):
        xs = ctx.saved_tensors
        return tuple((i + 2) * g * x + h for i, x in enumerate(xs))


def subsets(inputs):
    return [chosen for size in range(1, inputs + 1) for chosen in itertools.combinations(range(inputs), size)]


class Plain(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.others = nn.ParameterList(torch.randn(3) for _ in range(inputs - 1))

    def values(self, x):
        return [self.linear(x), *self.others]

    def forward(self, x):
        return Mixed.apply(*self.values(x))[0]


class Asking(Plain):
    """Asks for each choice of gradients; with ``create``, they can be differentiated."""

    def __init__(self, inputs, create):
        super().__init__(inputs)
        self.create = create

    def forward(self, x):
        values, found = self.values(x.requires_grad_()), []
        for chosen in subsets(len(values)):
            energy = Mixed.apply(*values)[0].square().sum()
            found += torch.autograd.grad(energy, [values[i] for i in chosen], create_graph=self.create)
        return torch.cat([value.reshape(-1, 3).sum(0) for value in found]) if self.create else torch.cat([v.reshape(-1, 3) for v in found])


@pytest.fixture(params=[pytest.param(True, marks=pytest.mark.slow), False], ids=["dynamo", "torchscript"])
def dynamo(request):
    return request.param


@pytest.mark.parametrize("inputs", [1, 2, 3, 4])
def test_each_choice_of_gradients_in_a_forward(inputs, dynamo, tmp_path):
    torch.manual_seed(0)
    model, x, target = Asking(inputs, True), torch.randn(5, 3), torch.tensor(0.5)
    program = exporter.export(copy.deepcopy(model), (x,), portable=True, dynamo=dynamo, dynamic_shapes={"x": {0: "rows"}})
    program.save(tmp_path / "model.onnx")
    onnx.checker.check_model(ir.to_proto(exporter.build_gradient_graph(tmp_path / "model.onnx")), full_check=True)
    loaded = exporter.load(tmp_path / "model.onnx")
    for rows in (5, 7):
        given = torch.randn(rows, 3)
        ours, theirs = given.clone().requires_grad_(), given.clone().requires_grad_()
        y, z = loaded(ours), model(theirs)
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-4)
        loaded.zero_grad()
        model.zero_grad()
        y.sin().sum().backward()
        z.sin().sum().backward()
        for a, b in zip((ours, *loaded.parameters()), (theirs, *model.parameters()), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3)

    def loss(found, wanted):
        return (found - wanted).square().mean()

    options = {"optimizer": "sgd", "hyperparameters": {"lr": 1e-4}, "portable": True, "dynamo": dynamo}
    step = exporter.export_training_step(copy.deepcopy(model), (x,), loss=loss, targets=(target,), **options)
    onnx.checker.check_model(ir.to_proto(step.model), full_check=True)
    assert exporter.Trainer(step).step({"x": x, "target": target}) == pytest.approx(float(loss(model(x), target)), rel=1e-4)


@pytest.mark.parametrize("inputs", [2, 4])
def test_each_choice_of_gradients_without_a_graph_of_them(inputs, dynamo):
    torch.manual_seed(0)
    model, x = Asking(inputs, False), torch.randn(5, 3)
    program = exporter.export(copy.deepcopy(model), (x,), portable=True, dynamo=dynamo)
    onnx.checker.check_model(program.model_proto, full_check=True)
    torch.testing.assert_close(exporter.load(program)(x), model(x.clone()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inputs", [1, 2, 3, 4])
def test_a_gradient_graph_of_each_choice(inputs, dynamo):
    torch.manual_seed(0)
    model, x = Plain(inputs), torch.randn(5, 3)
    program = exporter.export(copy.deepcopy(model), (x,), portable=True, dynamo=dynamo)
    names = ["x", *(f"others.{i}" for i in range(inputs - 1))]
    names[0] = program.model.graph.inputs[0].name
    x.requires_grad_()
    model(x).sum().backward()
    wanted = [x.grad, *(p.grad for p in model.others)]
    for chosen in subsets(inputs):
        graph = exporter.build_gradient_graph(program, wrt=[names[i] for i in chosen])
        proto = ir.to_proto(graph)
        onnx.checker.check_model(proto, full_check=True)
        session, pairing = exporter.inference_session(proto), pairing_of(graph)
        feeds = {names[0]: x.detach().numpy(), next(iter(pairing.inputs.values())): torch.ones(5, 3).numpy()}
        found = session.run([pairing.outputs[names[i]] for i in chosen], feeds)
        for i, value in zip(chosen, found, strict=True):
            torch.testing.assert_close(torch.from_numpy(value), wanted[i], rtol=1e-4, atol=1e-4)
