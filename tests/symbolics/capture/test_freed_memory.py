"""Functions that give the memory of an argument back, as reversible blocks do: captured without a read of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter
from symbolics.capture.side_effects import was_freed


class Frees(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        x.untyped_storage().resize_(0)
        return y

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return Frees.apply(self.linear(x))


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.filterwarnings("ignore:.*changes argument x in place")
def test_an_argument_whose_memory_is_given_back(dynamo, tmp_path):
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 3)
    exporter.export(net, (x,), dynamo=dynamo, portable=True).save(tmp_path / "frees.onnx")
    module = exporter.load(tmp_path / "frees.onnx")
    torch.testing.assert_close(module(x), net(x))
    for each in (module, net):
        each(x).sum().backward()
    torch.testing.assert_close(module.linear.weight.grad, net.linear.weight.grad)


def test_what_was_freed():
    x = torch.randn(4, 4)
    assert not any(map(was_freed, (x, x[:, 1:], x.t(), x[:0], torch.ones(()).expand(3, 3), x.to_sparse())))
    part = x[2:]
    x.untyped_storage().resize_(32)
    assert was_freed(x) and was_freed(part) and not was_freed(x[:2])
