"""The model that verify runs is a copy, and the state of an iteration that has converged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exporter
from exporter.errors import ExportError
from exporter.verification.compare import compare
from exporter.verification.eager import EagerStep


class Uncopied(nn.Module):
    """Its class asks an instance for what it has not yet, as classes with a __getattr__ of their own do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x)

    def __setstate__(self, state):
        raise KeyError("inner")


def test_a_model_that_cannot_be_copied_is_an_error_with_a_way_out(dynamo):
    with pytest.raises(ExportError, match=r"copy\.deepcopy\(model\) raises KeyError[\s\S]*way out: give the class"):
        exporter.verify(Uncopied(), (torch.randn(2, 3),), dynamo=dynamo)


@pytest.mark.parametrize(("moved", "ok"), [(1e-7, True), (1e-5, False), (float("nan"), False)])
def test_a_buffer_that_eager_leaves_may_move_by_roundings(moved, ok):
    before = torch.tensor([0.5, -1.0])
    wanted = EagerStep({}, [], [], {}, {}, untouched={"u": before})
    got = EagerStep({}, [], [], {}, {"u": before + moved})
    (row,) = compare(wanted, None, got, {}, untouched=wanted.untouched)
    assert row.ok == ok
    (row,) = compare(wanted, None, got, {})
    assert row.problem == "eager's forward leaves it as it was"
