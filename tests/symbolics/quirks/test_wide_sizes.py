"""What follows from sizes is computed in float64 where it meets float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import exporter

DYNAMO = pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
OPEN = pytest.mark.parametrize("open_", [True, False], ids=["open", "fixed"])

#: What is computed of x and of its last size n.
FORMS = {
    "root": lambda x, n: x / n**0.5,
    "root of a quotient": lambda x, n: x / (n // 2 + 1) ** 0.5,
    "reciprocal": lambda x, n: x * (1 / n),
    "tenth": lambda x, n: x * (n * 0.1),
    "pi": lambda x, n: x * (math.pi / n),
    "base": lambda x, n: x * 0.9**n,
    "negative exponent": lambda x, n: x * n**-0.5,
    "two sizes": lambda x, n: x * ((x.shape[0] * n) ** 0.5 / (n + 0.3) - 0.7 * x.shape[0]),
    "negative": lambda x, n: x * -(n**0.5) + (1 - 1 / n) * x,
    "a number beside": lambda x, n: x * 0.1 / n**0.5 + 0.3,
    "elements": lambda x, n: x / x.numel() ** 0.5,
    "square": lambda x, n: x / (1 / n**2),
    "tensor": lambda x, n: x * torch.tensor(n**0.5, dtype=x.dtype),
    "tensor in float32": lambda x, n: x * torch.tensor(n**0.5),
    "tensor of a whole": lambda x, n: x * torch.tensor(n) ** 0.5,
    "full": lambda x, n: x + torch.full((n,), n * 0.1, dtype=x.dtype),
    "full in float32": lambda x, n: x + torch.full((n,), n * 0.1),
    "arange": lambda x, n: x.sum() * torch.arange(0, n * 0.3, 0.7, dtype=x.dtype),
    "linspace": lambda x, n: x * torch.linspace(-1 / n, math.pi, n, dtype=x.dtype),
    "clamp": lambda x, n: x.clamp(-0.01 * n, n * 0.01),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n**-0.5),
    "where": lambda x, n: torch.where(x > 0, x, n * 0.1),
    "alpha": lambda x, n: torch.add(x, x, alpha=n * 0.1),
    "new_full": lambda x, n: x + x.new_full((1,), 1 / n),
    "lerp": lambda x, n: torch.lerp(x, x * 2, 1 / n),
    "mean": lambda x, n: x.mean(-1) + x.sum(-1) / n,
    "var": lambda x, n: x.var(-1, correction=0),
}


class Formed(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form
        self.scale = nn.Parameter(torch.full((1,), 0.7, dtype=torch.float64))

    def forward(self, x):
        return self.form(x * self.scale, x.shape[-1])


def random(*sizes):
    return torch.rand(*sizes, dtype=torch.float64, generator=torch.manual_seed(0)) + 0.1


def check(model, file, columns):
    """Values and gradients of a file, at some sizes."""
    for n in columns:
        x, y = random(4, n).requires_grad_(), random(4, n).requires_grad_()
        found, wanted = file(x), model(y)
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-15)
        for result in (found, wanted):
            result.square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-13, atol=1e-14)


@OPEN
@DYNAMO
@pytest.mark.parametrize("form", FORMS)
def test_modules(form, dynamo, open_):
    model = Formed(FORMS[form])
    file = exporter.load(exporter.export(model, (random(4, 6),), dynamo=dynamo, dynamic_shapes={"x": {1: "n"}} if open_ else None))
    check(model, file, (7, 100, 1) if open_ else (6,))


class Rooted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.n = x.shape[-1]
        return x / math.sqrt(ctx.n) * (ctx.n * 0.1)

    @staticmethod
    def backward(ctx, g):
        return g / ctx.n**0.5 * (math.pi / ctx.n) * 0.1


class Applied(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.7, dtype=torch.float64))

    def forward(self, x):
        return Rooted.apply(x * self.scale)


@OPEN
@DYNAMO
def test_portable_functions(dynamo, open_):
    program = exporter.export(
        Applied(), (random(4, 6),), dynamo=dynamo, dynamic_shapes={"x": {1: "n"}} if open_ else None, portable=[Rooted]
    )
    assert not any(node.op_type == "PythonOp" for node in program.model.graph)
    check(Applied(), exporter.load(program), (7, 100, 1) if open_ else (6,))


@DYNAMO
def test_steps(dynamo):
    model, x, target = Formed(FORMS["two sizes"]), random(4, 6), random(4, 6)
    options = {"loss": nn.functional.mse_loss, "targets": (target,), "optimizer": "sgd", "hyperparameters": {"lr": 0.1}, "dynamo": dynamo}
    trainer = exporter.Trainer(exporter.export_training_step(model, (x,), **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        found = trainer.step({"x": x, "target": target})
        optimizer.zero_grad()
        wanted = nn.functional.mse_loss(model(x), target)
        wanted.backward()
        optimizer.step()
        assert float(found) == pytest.approx(float(wanted), rel=1e-14)


class Half(torch.autograd.Function):
    """The largest half of a row."""

    @staticmethod
    def forward(ctx, x):
        values, places = x.topk(x.shape[-1] // 2, dim=-1)
        ctx.save_for_backward(places)
        ctx.n = x.shape[-1]
        return values

    @staticmethod
    def backward(ctx, g):
        (places,) = ctx.saved_tensors
        return g.new_zeros(*g.shape[:-1], ctx.n).scatter(-1, places, g)


class Above(Half):
    @staticmethod
    def backward(ctx, g):
        (places,) = ctx.saved_tensors
        count = g.shape[-1] + (1 if ctx.n > 4 else 2)
        return g.new_zeros(*g.shape[:-1], ctx.n).scatter(-1, places, g) / count


class Halved(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


@DYNAMO
def test_a_count_that_is_half_of_a_size_is_portable(dynamo):
    program = exporter.export(Halved(Half), (random(4, 6),), dynamo=dynamo, dynamic_shapes={"x": {1: "n"}}, portable=[Half])
    assert not any(node.op_type == "PythonOp" for node in program.model.graph)
    check(Halved(Half), exporter.load(program), (2, 3, 7, 20))


@DYNAMO
def test_the_refusal_says_where_the_condition_is(dynamo):
    with pytest.raises(exporter.ExportError, match=r"depends on a size .*in backward at \S*test_wide_sizes:\d+") as caught:
        exporter.export(Halved(Above), (random(4, 6),), dynamo=dynamo, dynamic_shapes={"x": {1: "n"}}, portable=[Above])
    assert len(str(caught.value).splitlines()) <= 6
