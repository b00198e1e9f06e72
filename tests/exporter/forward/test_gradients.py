"""Gradients of exported files against eager: PythonOps, stops and frozen parameters, on both exporters."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import exporter
from exporter.gradient_graph.build import build_gradient_graph
from symbolics.node.metadata import read_pairing
from tests.symbolics.capture import functions as f
from tests.zoo.everything import Everything
from tests.zoo.stopped import STOPPED


def gradients_equal(model, dynamo, x=None, **options):
    """Build the gradient graph of an export and compare every gradient with eager's."""
    x = torch.randn(5, 4) if x is None else x
    program = exporter.export(model, (x,), dynamo=dynamo, **options)
    training = build_gradient_graph(program)
    proto = ir.to_proto(training)
    onnx.checker.check_model(proto, full_check=True)
    pairing = read_pairing(training.metadata_props)

    twin, leaf = copy.deepcopy(model), x.clone().requires_grad_()
    outputs = twin(leaf.clone())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = {
        v.name: torch.randn_like(o) for v, o in zip(program.model.graph.outputs, outputs, strict=True) if v.name in pairing.inputs
    }
    torch.autograd.backward(
        [o for o in outputs if o.requires_grad], [c for c, o in zip(cotangents.values(), outputs, strict=False) if o.requires_grad]
    )
    feeds = {program.model.graph.inputs[0].name: x.numpy(), **{pairing.inputs[name]: c.numpy() for name, c in cotangents.items()}}
    evaluator = exporter.reference_evaluator(proto, allow=["tests.*"])
    results = dict(zip([v.name for v in training.graph.outputs], evaluator.run(None, feeds), strict=True))

    expected = {program.model.graph.inputs[0].name: leaf.grad, **{name: p.grad for name, p in twin.named_parameters() if p.requires_grad}}
    assert set(pairing.outputs) == set(expected), "the default wrt: trainable parameters and float inputs"
    for name, want in expected.items():
        got = results[pairing.outputs[name]]
        if want is None:
            assert name in pairing.unreached and not got.any()
        else:
            np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-4 * max(1.0, float(want.abs().max())), err_msg=name)
    return training


@pytest.mark.parametrize("model", [c[0] for c in STOPPED if c[0].__name__ != "Gumbel"], ids=lambda c: c.__name__)
def test_gradients_stop_where_eager_stops_them(model, dynamo):
    gradients_equal(model(), dynamo, torch.randn(5, 4) * 3)


CALLS = {
    "its own backward": lambda m, x: f.Scale.apply(x, m.weight, 0.1),
    "a chain": lambda m, x: f.Scale.apply(torch.tanh(f.Scale.apply(x, m.weight, 0.5)), m.weight, 2.0),
    "numpy": lambda m, x: f.NumpyGelu.apply(x * 2),
    "two outputs": lambda m, x: f.Halves.apply(x)[0] * f.Halves.apply(x)[3],
    "one unused output": lambda m, x: f.Halves.apply(x)[3],
    "in place": lambda m, x: f.AddInPlace.apply(x * 1, 2.0) * x,
    "under no_grad": lambda m, x: x * no_grad(x, m.weight),
    "tensors in containers": lambda m, x: f.Concat.apply([x], {"a": x, "b": 3}, x, "side by side"),
    "a size": lambda m, x: f.TakeRows.apply(x, x.shape[0]),
    "inlined": lambda m, x: torch.nn.functional.softsign(x) + f.Setup.apply(x),
}


def no_grad(x, weight):
    with torch.no_grad():
        return f.Scale.apply(x, weight, 2.0)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_calls(name, dynamo):
    gradients_equal(f.Call(CALLS[name], weight=torch.nn.Parameter(torch.rand(4))), dynamo)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_gradients_of_everything(dynamo, training):
    gradients_equal(Everything().train(training), dynamo)


def test_the_backward_is_the_functions_own(dynamo):
    """Scale's backward is not its derivative: a lost backward would show."""
    model = f.Call(lambda m, x: f.Scale.apply(x, torch.ones(4)))
    program = exporter.export(model, (torch.randn(2, 4),), dynamo=dynamo)
    training = build_gradient_graph(program, wrt=[program.model.graph.inputs[0].name])
    evaluator = exporter.reference_evaluator(ir.to_proto(training), allow=["tests.*"])
    pairing = read_pairing(training.metadata_props)
    (name,), (gradient,) = pairing.inputs.values(), pairing.outputs.values()
    feeds = {program.model.graph.inputs[0].name: np.ones((2, 4), np.float32), name: np.ones((2, 4), np.float32)}
    assert (dict(zip([o.name for o in training.graph.outputs], evaluator.run(None, feeds), strict=True))[gradient] == 3).all()


class Branches(torch.nn.Module):
    """torch.cond, once with a stop behind it."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def branch(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.inner(x).sin(), lambda x: self.inner(x).exp() * x, (x,))

    def forward(self, x):
        return self.outer(self.branch(x)) + self.branch(x * 2).detach() * x


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
def test_gradients_flow_through_a_branch_and_stop_where_eager_stops_them(sign):
    training = gradients_equal(Branches(), True, sign * torch.rand(5, 4))
    assert [n.op_type for n in training.graph].count("If") >= 3


class Detaches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x).sin().detach() * self.linear(x)


class Graph(torch.fx.GraphModule):
    """A graph with a method of its own."""

    def named(self):
        return "mine"


@pytest.mark.parametrize("kind", [torch.fx.GraphModule, Graph])
def test_a_graph_of_fx_stops_gradients_where_the_model_does(kind, dynamo):
    """torch.export runs such a graph node by node, and never calls its forward."""
    model, x = kind(module := Detaches(), torch.fx.symbolic_trace(module).graph), torch.randn(2, 3)
    loaded = exporter.load(exporter.export(model, (x,), dynamo=dynamo))
    assert isinstance(model, kind)
    for side in (model, loaded):
        side(x).sum().backward()
    for one, two in zip(model.parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad)
