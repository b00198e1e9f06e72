"""Second derivatives through backwards that are no linear functions of what comes in, or that read what forward gave out: against eager mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter


class Function(torch.autograd.Function):
    """x times 2; the backwards differ."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2


class Square(Function):
    @staticmethod
    def backward(ctx, g):
        return g**2


class Signed(Function):
    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].sign() * g.abs()


class Normed(Function):
    @staticmethod
    def backward(ctx, g):
        return g / (g.norm() + 1e-3)


class Clipped(Function):
    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.5, 0.5) + 0.1 * ctx.saved_tensors[0] ** 2


class Penalty(Function):
    """Eager has None for what a second derivative sends back to x: no backward below it runs, and adds its 1."""

    @staticmethod
    def backward(ctx, g):
        return 2 * g + 1


class Sine(torch.autograd.Function):
    """Keeps its output: a second derivative comes back to it, and to backward with what else the output is used for."""

    @staticmethod
    def forward(ctx, x):
        y = x.sin()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g * g * ctx.saved_tensors[0]


class Pair(torch.autograd.Function):
    """Two outputs, both kept, and what it does depends on which of them has a gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        y, z = x.sin(), x.exp()
        ctx.save_for_backward(y, z)
        return y, z

    @staticmethod
    def backward(ctx, g, h):
        y, z = ctx.saved_tensors
        return (0 if g is None else g * z + 0.1) + (0 if h is None else h * h * y - 0.2)


class Forces(nn.Module):
    """A gradient taken in forward: its norm, or it with the energy."""

    def __init__(self, functions, squared, both):
        super().__init__()
        self.functions, self.squared, self.both = functions, squared, both
        self.w = nn.Parameter(torch.tensor([0.7, -1.3, 0.4], dtype=torch.float64))

    def forward(self, x):
        y = x * self.w
        for function in self.functions:
            y = function.apply(y)
            y = y[0] + 0.5 * y[1] if isinstance(y, tuple) and self.squared else y[0] if isinstance(y, tuple) else y
        energy = (y * y).sum() if self.squared else y.sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + (force * force).sum() if self.both else force


CHAINS = [
    (Square,), (Signed,), (Normed,), (Clipped,), (Sine,), (Pair,), (Penalty, Penalty), (Square, Penalty), (Penalty, Sine), (Sine, Penalty),
    (Pair, Sine), (Sine, Clipped), (Normed, Signed),
]  # fmt: skip


@pytest.mark.parametrize(
    ("chain", "dynamo"),
    [*((chain, True) for chain in CHAINS), *((chain, False) for chain in CHAINS[::3])],
    ids=lambda given: "-".join(f.__name__ for f in given) if isinstance(given, tuple) else f"dynamo={given}",
)
def test_gradients_of_a_gradient_in_forward(chain, dynamo):
    x = torch.tensor([0.9, 0.6, -1.1], dtype=torch.float64)
    for squared, both in ((False, False), (True, True)):
        model = Forces(chain, squared, both)
        program = exporter.export(model, (x.clone().requires_grad_(),), dynamo=dynamo, eager_check=False)
        found = []
        for module in (model, exporter.load(program, allow=[f"{__name__}:*"])):
            given, w = x.clone().requires_grad_(), dict(module.named_parameters())["w"]
            result = module(given)
            gradients = torch.autograd.grad(result.sum(), [given, w], allow_unused=True)
            found.append([result.detach(), *(torch.zeros(3, dtype=x.dtype) if g is None else g for g in gradients)])
        torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("large", [False, True])
def test_a_kept_output_by_both_evaluators(large):
    """A large output is known by its edge alone."""
    x = torch.linspace(-1, 1, 9000 if large else 3, dtype=torch.float64)
    model = Forces((Sine,), True, True)
    model.w = nn.Parameter(torch.linspace(1, 2, len(x), dtype=torch.float64))
    wanted = x.clone().requires_grad_()
    model(wanted).backward()
    program = exporter.export(model, (x.clone().requires_grad_(),), input_names=["x"], eager_check=False)
    training = exporter.build_gradient_graph(program, wrt=["x"])
    feeds = {v.name: x.numpy() if v.name == "x" else torch.ones((), dtype=torch.float64).numpy() for v in training.graph.inputs}
    for make in (exporter.inference_session, exporter.reference_evaluator):
        got = make(training, allow=[f"{__name__}:*"]).run(["x_grad"], feeds)[0]
        torch.testing.assert_close(torch.from_numpy(got), wanted.grad, rtol=1e-9, atol=1e-9)
