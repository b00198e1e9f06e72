"""requires_grad flags that a forward takes away and gives back: gradients go where they go in eager mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter
from tests.zoo.functions import TwoInputs

grad = torch.autograd.grad


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.w, self.linear = nn.Parameter(torch.rand(3, dtype=torch.float64, generator=generator) + 0.5), nn.Linear(3, 3).double()
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def parameter(m, x):
    m.w.requires_grad_(False)
    y = x * m.w
    m.w.requires_grad_(True)
    return y * m.w


def attribute(m, x):
    m.w.requires_grad = False
    y = x * m.w * (5 if m.w.requires_grad else 3)
    m.w.requires_grad = True
    return y * m.w * (5 if m.w.requires_grad else 3)


def module(m, x):
    m.linear.requires_grad_(False)
    y = m.linear(x)
    m.linear.requires_grad_(True)
    return m.linear(y) * m.w


def functions(m, x):
    m.w.requires_grad_(False)
    y = TwoInputs.apply(x, m.w)[0]
    m.w.requires_grad_(requires_grad=True)
    return TwoInputs.apply(y, m.w)[0]


def transposed(m, x):
    m.linear.weight.requires_grad_(False)
    y = x @ m.linear.weight.T
    m.linear.weight.requires_grad_(True)
    return y @ m.linear.weight * m.w


def among_others(m, x):
    m.w.requires_grad_(False)
    y = torch.stack([x[0], m.w])
    m.w.requires_grad_(True)
    return y * m.w


def itself(m, x):
    m.w.requires_grad_(False)
    same = m.w.double()  # no copy: it has its flag back, too
    m.w.requires_grad_(True)
    return x * same


def computed(m, x):
    m.w.requires_grad_(False)
    y = m.w * 2
    m.w.requires_grad_(True)
    return x * y * m.w * (5 if y.requires_grad else 3)


def stays(m, x):
    m.w.requires_grad_(False)
    return m.linear(x) * m.w


def changed(m, x):
    h = (x * m.w).detach().clone()
    h.requires_grad_(True)
    a = h * 2
    h.requires_grad_(False)
    h.mul_(3)
    return a * h + m.w


def model_input(m, x):
    x.requires_grad_(False)
    y = (x * m.w) ** 2
    x.requires_grad_(True)
    return y * x


def view_of_an_input(m, x):
    h = x[:, None]
    h.requires_grad = False
    y = h * m.w
    h.requires_grad = True
    return y * h


def leaf(m, x):
    h = (x * m.w).detach().requires_grad_(True)
    a = h**2
    h.requires_grad_(False)
    b = h**3
    h.requires_grad_(True)
    (g,) = grad((a + b + h).sum(), h, create_graph=True)
    return g * m.w


def around_a_gradient(m, x):
    x.requires_grad_(True)
    m.w.requires_grad_(False)
    (g,) = grad((x**2 * m.w).sum(), x, create_graph=True)
    m.w.requires_grad_(True)
    return g * m.w


def too_early(m, x):
    x.requires_grad_(True)
    m.w.requires_grad_(False)
    y = TwoInputs.apply(x, m.w)[0].sin() if m.training else (x * m.w).sin()
    m.w.requires_grad_(True)
    return grad(y.sum(), x, create_graph=True)[0]


CASES = [
    parameter, attribute, module, functions, transposed, among_others, itself, computed, stays, changed, model_input, view_of_an_input, leaf,
    around_a_gradient,
]  # fmt: skip


@pytest.mark.parametrize("function", CASES)
def test_gradients_as_in_eager_mode(function, dynamo):
    model = Model(function)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    program = exporter.export(model, (x,), dynamo=dynamo)
    assert all(p.requires_grad for p in model.parameters()), "the export leaves the model as it was"
    loaded = exporter.load(program, allow=[TwoInputs])
    inputs = [x.clone().requires_grad_(function is not view_of_an_input) for _ in range(2)]  # a view of that one is no leaf
    results = [each(given) for each, given in zip((model, loaded), inputs, strict=True)]
    torch.testing.assert_close(results[1], results[0])
    wanted = [*model.parameters(), *(inputs[:1] if inputs[0].requires_grad else [])]
    found = [
        *(dict(loaded.named_parameters())[name] for name, _ in model.named_parameters()),
        *(inputs[1:] if inputs[1].requires_grad else []),
    ]
    for each in model.parameters():
        each.requires_grad_(True)  # stays
    eager = grad(results[0].sum(), wanted, allow_unused=True, materialize_grads=True)
    ours = grad(results[1].sum(), found, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("function", [parameter, module, model_input, around_a_gradient])
def test_verify(function, dynamo):
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    assert exporter.verify(Model(function), (x,), dynamo=dynamo).ok


@pytest.mark.parametrize("training", [True, False])
def test_a_second_derivative_that_eager_mode_has_and_no_first_one(training, dynamo):
    """What autograd saved of a leaf has the flag that the leaf has now."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    model = Model(too_early).train(training)
    with pytest.raises(exporter.ExportError, match=r"torch.autograd.grad.*test_flags:\d+.*Set the flag back after this call"):
        exporter.export(model, (x,), dynamo=dynamo)
