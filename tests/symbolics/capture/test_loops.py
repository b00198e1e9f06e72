"""Functions in the bodies of scan and while_loop: a state that starts without a gradient has one after the first step."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import exporter
from tests.zoo.steep import Steep


class Scanned(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x):
        from torch._higher_order_ops.scan import scan

        return scan(lambda state, v: (Steep.apply(state) * self.w + v, state * v), torch.zeros(4), x, dim=0)[1]


class Unrolled(Scanned):
    def forward(self, x):
        state, out = torch.zeros(4), []
        for v in x:
            out.append(state * v)
            state = Steep.apply(state) * self.w + v
        return torch.stack(out)


class Repeated(Scanned):
    def forward(self, x):
        from torch._higher_order_ops.while_loop import while_loop

        return while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, Steep.apply(s) * self.w + x[0]), (torch.tensor(0), torch.zeros(4)))[1]


class RepeatedUnrolled(Scanned):
    def forward(self, x):
        state = torch.zeros(4)
        for _ in range(3):
            state = Steep.apply(state) * self.w + x[0]
        return state


@pytest.mark.parametrize(("looped", "plain"), [(Scanned, Unrolled), (Repeated, RepeatedUnrolled)])
def test_like_a_loop_of_python(looped, plain):
    torch.manual_seed(3)
    model, reference = looped(), plain()
    reference.load_state_dict(model.state_dict())
    x = torch.randn(5, 4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program = exporter.export(model, (x,))
    assert not [w for w in said if "lru_cache" in str(w.message)], "Dynamo, which traces what stands around the model in bodies"
    module = exporter.load(program, allow=["tests.*:*"])
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    ours, wanted = module(mine), reference(theirs)
    torch.testing.assert_close(ours, wanted)
    ours.square().sum().backward(), wanted.square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(module.get_parameter("w").grad, reference.w.grad)
