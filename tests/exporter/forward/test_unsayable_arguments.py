"""Functions with an argument that no file can say: a method of a frozen module, an object. They become standard operators, with a warning."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import Function

import exporter
from symbolics.errors import ExportError, PythonopWarning


class Times(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight()

    @staticmethod
    def backward(ctx, g):
        return 3 * g @ ctx.weight().t(), None  # not the derivative of forward: a file that has lost it differs


class Shift:
    """No class of values: nothing writes it into a file."""

    def __init__(self, by):
        self.by = by

    def __call__(self):
        return torch.eye(3) + self.by


class OnValues(Times):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return torch.from_numpy(x.detach().numpy() @ weight().numpy())


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.packed = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.register_buffer("scale", torch.tensor(2.0))

    def weight(self):
        return self.packed * self.scale


class Net(nn.Module):
    def __init__(self, kind, function=Times):
        super().__init__()
        self.linear, self.frozen, self.kind, self.function = nn.Linear(3, 3), Frozen(), kind, function
        self.shift = Shift(0.5)

    def forward(self, x):
        return self.function.apply(self.linear(x), self.frozen.weight if self.kind == "method" else self.shift)


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("kind", ["method", "object"])
def test_it_becomes_standard_operators(kind, dynamo, tmp_path):
    torch.manual_seed(0)
    net, x = Net(kind), torch.randn(4, 3)
    with pytest.warns(PythonopWarning, match=r"argument 1: an object of type .* are standard operators"):
        program = exporter.export(net, (x,), dynamo=dynamo)
    assert [call.kind for call in program.portable] == ["function"]
    program.save(tmp_path / "net.onnx")
    module = exporter.load(tmp_path / "net.onnx")  # nothing is allowed: no Python runs
    other = torch.randn(4, 3)
    torch.testing.assert_close(module(other), net(other))
    for each in (module, net):
        each(other).sum().backward()
    torch.testing.assert_close(module.linear.weight.grad, net.linear.weight.grad)


@pytest.mark.parametrize("dynamo", [True, False])
def test_what_no_operators_can_say_is_refused_with_both_reasons(dynamo):
    with pytest.raises(ExportError, match=r"argument 1: an object of type .*No function of the file can stand for it"):
        exporter.export(Net("object", OnValues), (torch.randn(4, 3),), dynamo=dynamo)
