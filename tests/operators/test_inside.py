"""A few of torch's operators under torch.autograd.grad in a forward; `python -m tests.operators.inside` runs all of them."""

from __future__ import annotations

import pytest
import torch

from tests.operators import inside

#: Products and rows that an export writes in other words; functions that give back their argument; indices; a view; an operator with extremes.
OPERATORS = "einsum tensordot index_add scatter_add gather contiguous atleast_2d hstack flatten cumsum amax clamp".split()


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", OPERATORS)
def test_the_gradient_of_eager(name, dynamo):
    assert inside.judge(name, dynamo) == ("right", "")


class _Other(torch.nn.Module):
    def forward(self, *tensors):
        return tuple(t * 0 + 7.0 for t in tensors)


def test_what_is_wrong_is_said(monkeypatch):
    """The judge compares: a file of another function is wrong."""
    exported = inside.exporter.export
    monkeypatch.setattr(inside.exporter, "export", lambda model, args, **options: exported(_Other(), args, **options))
    assert inside.judge("sin", True)[0] == "wrong"
