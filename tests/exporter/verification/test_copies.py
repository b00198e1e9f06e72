"""The model that verify runs is a copy, and the state of an iteration that has converged."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from torch import nn

import exporter
from exporter.errors import ExportError
from exporter.verification.compare import compare
from exporter.verification.eager import EagerStep, in_float64


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


class Wrapped(nn.Module):
    """What libraries put in the place of a module's forward: Python copies no weak reference, and nothing that a function closes over."""

    def __init__(self, how):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = torch.tensor([0.5, 1.0, 2.0])  # no buffer: to() leaves it
        inner, forward = self.inner, type(self.inner).forward
        if how == "weakly":
            inner.forward = partial(lambda it, x: forward(it(), x), weakref.ref(inner))
        elif how == "closure":
            inner.forward = lambda x: forward(inner, x) * 1.0
        elif how == "method":
            bound = inner.forward
            inner.forward = lambda x: bound(x) * 1.0
        else:
            self.inner.register_forward_hook(lambda module, args, result: result * inner.bias)

    def forward(self, x):
        return torch.tanh(self.inner(x)) @ torch.diag(self.scale)


@pytest.mark.parametrize("how", ["weakly", "closure", "method", "hook"])
def test_a_copy_leads_to_itself(how):
    model = Wrapped(how)
    case = exporter.Case(model, (torch.randn(2, 3),))
    step = EagerStep.run(case)
    precise = in_float64(case, step, None)
    assert all(p.grad is None for p in model.parameters()) and model.scale.dtype == torch.float32
    model(*case.args).backward(step.cotangents[0])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(step.gradients["parameter gradient", name], parameter.grad)
        assert precise.gradients["parameter gradient", name].dtype == torch.float64


_ELSEWHERE = {}


class Global(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = _ELSEWHERE["layer"] = nn.Linear(3, 3)

    def forward(self, x):
        return _ELSEWHERE["layer"](x)


def test_a_copy_that_runs_the_original_is_an_error():
    model = Global()
    model.layer.weight.grad = kept = torch.ones(3, 3)
    with pytest.raises(ExportError, match=r"still runs the original's parameter 'layer\.weight' and 1 more[\s\S]*way out: let it"):
        exporter.verify(model, (torch.randn(2, 3),))
    assert model.layer.weight.grad is kept and bool((kept == 1).all()) and model.layer.bias.grad is None
