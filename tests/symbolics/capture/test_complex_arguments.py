"""Complex tensors that no node can take: the error has the ways out of what is called, a Function, a module or an operator."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import exporter


class Power(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return (z * z.conj()).real

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


class Size(nn.Module):
    def forward(self, z):
        return z.abs()


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(torch.complex(x, x))


def refused(function, opaque=()):
    with pytest.raises(exporter.ExportError, match="complex tensor, which a PythonOp cannot take: ") as error:
        exporter.export(Net(function), (torch.randn(3),), dynamo=False, opaque=opaque)
    return re.sub("\\s+", " ", str(error.value)).partition("cannot take: ")[2]


AROUND = "name in opaque= a module around it that takes and returns real tensors"


def test_a_Function():
    said = refused(Power.apply)
    assert said.startswith("pass torch.view_as_real(z)") and "name the Function in inline=" in said and said.endswith(AROUND)


@pytest.mark.parametrize(("function", "opaque"), [(Size(), [Size]), (torch.abs, ["aten::abs"])], ids=["module", "operator"])
def test_what_is_no_Function_cannot_be_inlined(function, opaque):
    assert refused(function, opaque) == AROUND
