"""A Function's output that shares memory with its input is a value of its own in a file: no change of either may get lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter
from symbolics.errors import ExportError
from tests.trains import assert_step_alike


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return 3 * g


class Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x[:2]

    @staticmethod
    def backward(ctx, g):
        return torch.cat([3 * g, torch.zeros(1, 4)])


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        return y, y[:2]

    @staticmethod
    def backward(ctx, g, part):
        return 2 * g


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.a, self.body = nn.Linear(4, 4), body

    def forward(self, x):
        return self.body(self.a(x) + 0)


def changed_output(function):
    def body(h):
        y = function.apply(h)
        with torch.no_grad():
            y.mul_(2)
        return h

    return body


def changed_input(function):
    def body(h):
        y = function.apply(h)
        h.mul_(2)
        return y

    return body


def through_a_view(h):
    y = Same.apply(h)
    with torch.no_grad():
        h.view(-1)[0] = 7
    return y * 2


def two_steps(h):
    y = Same.apply(Same.apply(h))
    with torch.no_grad():
        y.mul_(2)
    return h.t() * 2


def two_outputs(h):
    y, part = Both.apply(h)
    with torch.no_grad():
        part.mul_(5)
    return y


def into_out(h):
    y = Same.apply(h)
    with torch.no_grad():
        torch.add(h.detach().clone(), 1, out=y)
    return h


def detached(h):
    y = h.detach()
    with torch.no_grad():
        h.mul_(2)
    return h * y


BODIES = {
    "the input": (changed_output(Same), "Same"),
    "a view of the input": (changed_output(Part), "Part"),
    "the output": (changed_input(Same), "Same"),
    "a view": (changed_input(Part), "Part"),
    "over two Functions": (two_steps, "Same"),
    "two outputs": (two_outputs, "Both"),
    "out=": (into_out, "Same"),
    "what was detached": (detached, r"detach\(\)"),
}


@pytest.mark.parametrize(("body", "name"), BODIES.values(), ids=BODIES.keys())
def test_a_change_that_the_file_would_not_see_is_refused(body, name, dynamo):
    line = "" if name.startswith("detach") else rf" at {__name__}:\d+ returned"
    with pytest.raises(ExportError, match=rf"changed its memory in place.*{name}{line}.*old value.*copy"):
        exporter.export(Net(body), (torch.randn(3, 4),), dynamo=dynamo)


def test_where_eager_refuses_it_with_gradients_alone(dynamo):
    """What a user sees who calls the model so: where it fails, eager's error; where it runs, ours."""
    model, args = Net(through_a_view), (torch.randn(3, 4),)
    with pytest.raises(
        ExportError, match=r"(?s)fails in eager mode.*Output 0 of Same is a view.*at test_aliases.py:\d+, in through_a_view"
    ):
        exporter.export(model, args, dynamo=dynamo)
    with torch.no_grad():
        model(*args)
        with pytest.raises(ExportError, match=rf"changed its memory in place.*Same at {__name__}:\d+ returned.*old value.*copy"):
            exporter.export(model, args, dynamo=dynamo)


def read_before(h):
    y = Same.apply(h)
    z = h.sum() * 1
    with torch.no_grad():
        y.mul_(2)
    return z


def of_a_copy(h):
    y = Same.apply(h).clone()
    y.mul_(2)
    return h + y


def shapes_alone(h):
    y = Same.apply(h)
    with torch.no_grad():
        y.mul_(2)
    return torch.ones_like(h) * h.shape[0]


@pytest.mark.parametrize("body", [read_before, of_a_copy, shapes_alone])
def test_a_change_that_nobody_reads_is_no_matter(body, dynamo):
    model, args = Net(body), (torch.randn(3, 4),)
    loaded = exporter.load(exporter.export(model, args, dynamo=dynamo), allow=[f"{__name__}:*"])
    if body is shapes_alone:
        torch.testing.assert_close(loaded(*args), model(*args))
    else:
        assert_step_alike(loaded, model, args)
