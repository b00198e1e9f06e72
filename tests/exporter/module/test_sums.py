"""Gradients of gradients of a loaded module through backwards that are no linear functions of what comes in: eager's numbers, or an error by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter
from exporter.runtime.sums import _passes
from symbolics.errors import RunError
from tests.exporter.gradient_graph.test_second_orders import Clipped, Normed, Pair, Penalty, Signed, Sine, Square

ALLOW = [f"{__name__}:*", "tests.exporter.gradient_graph.test_second_orders:*"]


class Constant(torch.autograd.Function):
    """Its backward does not read what comes in: in eager, nothing flows back from its gradient to the loss."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 0.3 * ctx.saved_tensors[0] ** 2


class Linear(torch.autograd.Function):
    runs = 0

    @staticmethod
    def forward(ctx, x):
        y = x.sin()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        Linear.runs += 1
        x, y = ctx.saved_tensors
        return g * x.cos() * (1 + 0.1 * y)


class Chain(nn.Module):
    def __init__(self, functions, between):
        super().__init__()
        self.functions, self.between = functions, between
        self.w = nn.Parameter(torch.tensor([0.7, -1.3, 0.4], dtype=torch.float64))

    def forward(self, x):
        y = x * self.w
        for function in self.functions:
            y = function.apply(y)
            y = y[0] + 0.5 * y[1] if isinstance(y, tuple) else y
            y = y.sin() + y if self.between else y
        return y


def gradient_of(loss, squared):
    """A loss of outputs and of a gradient: first with respect to the input, then to all."""

    def run(module, x, w):
        y = module(x)
        (g,) = torch.autograd.grad((y * y if squared else y).sum(), x, create_graph=True)
        return torch.autograd.grad(loss(y, g), [x, w], allow_unused=True)

    return run


def twice(module, x, w):
    """Two calls, one behind the other, and a graph that is kept."""
    y = module(x)
    z = module(y)
    (g,) = torch.autograd.grad((z * z).sum() + y.sum(), x, create_graph=True)
    loss = (g * g).sum() + z.sum()
    return *torch.autograd.grad(loss, [x, w], retain_graph=True), *torch.autograd.grad(2 * loss, [x, w])


USES = {
    "gradient": gradient_of(lambda y, g: (g * g).sum(), True),
    "sum of both": gradient_of(lambda y, g: y.sum() + g.sum(), False),
    "both": gradient_of(lambda y, g: (y * y).sum() + (g * g).sum(), True),
    "twice": twice,
}
CHAINS = [(Square,), (Penalty, Sine), (Sine, Clipped), (Pair, Sine), (Normed, Signed), (Constant, Sine), (Sine, Constant)]


def outcome(module, use, x):
    given, w = x.clone().requires_grad_(), dict(module.named_parameters())["w"]
    return [torch.zeros(3, dtype=x.dtype) if g is None else g for g in use(module, given, w)]


@pytest.mark.parametrize("between", [False, True], ids=["joined", "apart"])
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "-".join(f.__name__ for f in chain))
def test_as_in_eager(chain, between):
    """124 of 208 such cases were wrong."""
    x = torch.tensor([0.9, 0.6, -1.1], dtype=torch.float64)
    model = Chain(chain, between)
    module = exporter.load(exporter.export(model, (x.clone().requires_grad_(),), dynamo=False, eager_check=False), allow=ALLOW)
    for name, use in USES.items():
        torch.testing.assert_close(
            outcome(module, use, x), outcome(model, use, x), rtol=1e-8, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert not _passes.known


def loaded(function):
    x = torch.tensor([0.9, 0.6, -1.1], dtype=torch.float64, requires_grad=True)
    return exporter.load(exporter.export(Chain((function,), True), (x.detach(),), dynamo=False, eager_check=False), allow=ALLOW), x


def test_what_is_differentiated_a_third_time_is_refused_by_name():
    module, x = loaded(Sine)

    def third(create_graph):
        y = module(x)
        (g,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        return torch.autograd.grad((g * g).sum() + y.sum(), x, create_graph=create_graph)

    third(False)
    with pytest.raises(RunError, match=r"test_second_orders:Sine.*no linear function.*\n  way out: .*forward"):
        third(True)


def test_torch_func_refuses_it_too():
    module, x = loaded(Sine)
    inner = torch.func.grad(lambda x: module(x).square().sum())
    with pytest.raises(RunError, match=r"test_second_orders:Sine.*no linear function"):
        torch.func.grad(lambda x: inner(x).square().sum())(x.detach())
    linear, x = loaded(Linear)
    assert torch.func.jacrev(torch.func.jacrev(linear))(x.detach()).shape == (3, 3, 3)


def test_a_sum_costs_one_more_run_and_a_plain_backward_none():
    """Nothing is put in its place; it runs once more for the sum. Of the others, one is behind an output that stops what flows back."""
    module, x = loaded(Linear)
    y = module(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    Linear.runs = 0
    torch.autograd.grad((g * g).sum() + y.sum(), x)
    assert Linear.runs == 4
    Linear.runs = 0
    module(x).sum().backward()
    assert Linear.runs == 1
