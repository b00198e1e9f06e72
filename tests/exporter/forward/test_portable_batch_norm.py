"""A portable Function that calls batch_norm in training mode: by the statistics of the batch, in all of torch's spellings."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

import exporter

aten = torch.ops.aten


def fresh(x):
    return torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)


def read_after(x, w, b):
    """What batch_norm writes into a tensor of the Function's own, and the schema of its operator does not say."""
    mean, var = fresh(x)
    return F.batch_norm(x, mean, var, w, b, training=True, momentum=0.3) + (mean - var)[:, None, None]


SPELLINGS = {
    "batch_norm": lambda x, w, b: F.batch_norm(x, *fresh(x), w, b, training=True),
    "without weights": lambda x, w, b: F.batch_norm(x, *fresh(x), training=True) * w[:, None, None] + b[:, None, None],
    "without statistics": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "eval": lambda x, w, b: F.batch_norm(x, *fresh(x), w, b),
    "native": lambda x, w, b: torch.native_batch_norm(x, w, b, *fresh(x), True, 0.1, 1e-5)[0],
    "native without statistics": lambda x, w, b: torch.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)[0],
    "impl_index": lambda x, w, b: aten._batch_norm_impl_index(x, w, b, *fresh(x), True, 0.1, 1e-5, False)[0],
    "legit": lambda x, w, b: torch._native_batch_norm_legit(x, w, b, *fresh(x), True, 0.1, 1e-5)[0],
    "no_stats": lambda x, w, b: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)[0],
    "functional": lambda x, w, b: aten._native_batch_norm_legit_functional(x, w, b, *fresh(x), True, 0.1, 1e-5)[0],
    "with_update": lambda x, w, b: aten._batch_norm_with_update(x, w, b, *fresh(x), 0.1, 1e-5)[0],
    "statistics of the batch": lambda x, w, b: (
        sum(t[:, None, None] for t in torch.native_batch_norm(x, w, b, *fresh(x), True, 0.1, 1e-5)[1:]) * x
    ),
    "read after": read_after,
}


def function_of(norm):
    class Norm(Function):
        @staticmethod
        def forward(ctx, x, w, b):
            ctx.save_for_backward(x, w, b)
            return norm(x, w, b)

        @staticmethod
        def backward(ctx, g):
            inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            with torch.enable_grad():
                y = norm(*inputs)
            return torch.autograd.grad(y, inputs, g, materialize_grads=True)

    return Norm


class Net(nn.Module):
    def __init__(self, function, dtype):
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.arange(1.0, 4, dtype=dtype))
        self.b = nn.Parameter(torch.tensor([0.0, 0.5, 1.0], dtype=dtype))

    def forward(self, x):
        return self.function.apply(x, self.w, self.b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SPELLINGS)
def test_statistics_of_the_batch(name, dtype, dynamo):
    model = Net(function_of(SPELLINGS[name]), dtype)
    x = torch.randn(4, 3, 6, 6, dtype=dtype) * 2 + 1
    program = exporter.export(model, (x,), dynamo=dynamo, portable=True, dynamic_shapes={"x": {0: "batch"}})
    assert [call.kind for call in program.portable] == ["function"]
    loaded = exporter.load(program)
    for given in (x, torch.randn(7, 3, 6, 6, dtype=dtype)):
        ours, theirs = (given.clone().requires_grad_() for _ in range(2))
        y, z = loaded(ours), model(theirs)
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-4)
        g = torch.randn_like(z)
        loaded.zero_grad()
        model.zero_grad()
        y.backward(g)
        z.backward(g)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
        for a, b in zip(loaded.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-3)


class Recomputed(Function):
    """Its backward calls batch_norm, and may be differentiated itself."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return F.batch_norm(x, *fresh(x), w, b, training=True)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        axes = (0, 2, 3)
        h = F.batch_norm(x, *fresh(x), training=True)
        r = (x.var(axes, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        of_w = (g * h).mean(axes, keepdim=True)
        return w[:, None, None] * r * (g - g.mean(axes, keepdim=True) - h * of_w), (g * h).sum(axes), g.sum(axes)


def test_second_derivatives_through_the_statistics():
    model = Net(Recomputed, torch.float64)
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    loaded = exporter.load(exporter.export(model, (x,), dynamo=False, portable=True))
    found = []
    for run in (loaded, model):
        a = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(run(a).sin().sum(), a, create_graph=True)
        found.append((g, *torch.autograd.grad(g.square().sum(), a)))
    torch.testing.assert_close(*found)
