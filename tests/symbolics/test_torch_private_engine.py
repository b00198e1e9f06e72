"""The private names of torch's autograd engine: a test each, as in test_torch_private.py."""

from __future__ import annotations

import pytest
import torch

from symbolics import torch_private as private


@pytest.mark.parametrize("keep", [True, False])
def test_keeps_graph(keep):
    seen = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            seen.append(private.keeps_graph())
            return grad

    Ask.apply(torch.ones(1, requires_grad=True)).sum().backward(retain_graph=keep)
    assert seen == [keep]


def test_graph_task():
    assert private.graph_task() == -1
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(private.graph_task()))
    x.register_hook(lambda g: seen.append(private.graph_task()))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert seen[0] == seen[1] != seen[2] == seen[3] and min(seen) >= 0


def test_after_backward():
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: private.after_backward(lambda: seen.append("ended")))
    x.register_hook(lambda g: seen.append("leaf"))
    y.sum().backward()
    assert seen == ["leaf", "ended"]


def test_running_node():
    seen = []

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            seen.append(private.running_node())
            return grad

    x = torch.ones(1, requires_grad=True)
    h = x * 2
    y = Ask.apply(h)
    h.register_hook(lambda grad: seen.append(private.running_node()))
    y.backward()
    assert seen == [y.grad_fn, h.grad_fn]
    assert private.running_node() is None


def test_run_backward():
    x = torch.ones(2, requires_grad=True)
    (found,) = private.run_backward((x * 3,), (torch.ones(2),), False, False, (x,), True, False)
    assert found.tolist() == [3, 3]
    assert x.grad is None
