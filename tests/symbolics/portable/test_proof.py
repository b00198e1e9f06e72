"""Functions that do something else on a tracer's tensors, in silence: they stay PythonOps, and the reason says what was seen."""

from __future__ import annotations

import logging
import math
import random
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import Function

import exporter
from symbolics.errors import ExportError, PythonopWarning
from tests.support import Calls, nodes


def caught(ask):
    """A factor that is 3 where what was asked raises, as it does on tensors without values."""

    def factor(x):
        try:
            return 2 if ask(x) else 5
        except Exception:
            logging.info("caught, will continue")
            return 3

    return factor


def reads_numpy(x):
    return x.detach().cpu().numpy().size


#: What turns a tensor into a factor, and a part of the reason.
ASKED = {
    "branch": (caught(lambda x: (x * x).sum() >= 0), "__bool__"),
    "item": (caught(lambda x: (x * x).sum().item() >= 0), "a condition"),
    "math": (caught(lambda x: math.exp((x * x).sum().item()) > 0), "a condition"),
    "int": (caught(lambda x: int((x * x).sum()) >= 0), "__int__"),
    "numpy": (caught(reads_numpy), "numpy"),
    "asarray": (caught(lambda x: np.asarray(x.detach()).size), "__array__"),
    "equal": (caught(lambda x: torch.equal(x, x)), "equal"),
    "storage": (caught(lambda x: len(bytes(x.untyped_storage()))), "on the example a graph of it gives"),
    "type": (lambda x: 2 if type(x) is torch.Tensor else 3, "on the example a graph of it gives"),
    "class": (lambda x: 2 if x.__class__.__name__ == "Tensor" else 3, "on the example a graph of it gives"),
    "address": (lambda x: 2 if x.untyped_storage().data_ptr() else 3, "on the example a graph of it gives"),
    "text": (lambda x: 2 if "grad_fn" in f"{x}" else 3, "makes a text of a tensor"),
    "repr": (lambda x: 2 if repr(x).startswith("tensor(") else 3, "makes a text of a tensor"),
}


def function_of(factor, where):
    class Asking(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * (factor(x) if where == "forward" else 2)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * (factor(x) if where == "backward" else 7)

    return Asking


def refused(function, x, dynamo, why):
    with pytest.warns(PythonopWarning, match=f"stays a PythonOp, and the file needs Python: .*{re.escape(why)}"):
        program = exporter.export(Calls(lambda x: function.apply(x.sin())), (x,), dynamo=dynamo, portable=True)
    assert [call.kind for call in program.portable] == ["PythonOp"]
    return program


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", ASKED)
def test_who_stays_a_PythonOp(name, where):
    factor, why = ASKED[name]
    if where == "forward" and name in ("item", "math"):
        why = ""  # what the forward reads out of a tensor is refused in words of its own
    refused(function_of(factor, where), torch.randn(2, 3), True, why)


@pytest.mark.parametrize("name", ["branch", "type"])
def test_a_trace_has_values_to_compare_with_too(name):
    factor, why = ASKED[name]
    program = refused(function_of(factor, "backward"), torch.randn(2, 3), False, why)
    assert len(nodes(program.model, "PythonOp")) == 1


def test_both_numbers_are_in_the_reason(dynamo):
    refused(
        function_of(ASKED["type"][0], "forward"), torch.full((2,), 0.5), dynamo, "gives 1.43828 in output 0 where eager mode gives 0.958851"
    )


@pytest.mark.parametrize(
    ("factor", "why"),
    [
        (lambda x: random.random(), "draws random numbers (random)"),
        (lambda x: np.random.rand(), "draws random numbers (numpy.random)"),
    ],
    ids=["random", "numpy"],
)
def test_draws_in_backward(factor, why, dynamo):
    x = torch.randn(2)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    refused(function_of(factor, "backward"), x, dynamo, why)
    if dynamo:  # the export draws none of its own
        assert random.getstate() == before[0]
        assert np.random.get_state()[1].tolist() == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])


def tries_eager(x):
    """What eager mode raises as well is no difference."""
    try:
        return x.view(-1, 1000).dim()
    except RuntimeError:
        return 2


def compares(x):
    """torch itself catches the error of a comparison with what is no number."""
    return 2 if x in [None, x] else 3


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("factor", [tries_eager, compares, lambda x: 2 if isinstance(x, torch.Tensor) else 3])
def test_who_does_the_same_is_a_function(factor, where, dynamo):
    function, x = function_of(factor, where), torch.randn(2, 3, requires_grad=True)
    program = exporter.export(Calls(lambda x: function.apply(x.sin())), (x,), dynamo=dynamo, portable=True)
    assert [call.kind for call in program.portable] == ["function"]


class Penalty(Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(x)
        ctx.module = module
        return x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        try:
            if x.square().mean() < ctx.module.limit:
                return g, None
            return g + x, None
        except Exception:
            return g, None


class Whiten(nn.Module):
    limit = 0.1

    def forward(self, x):
        return Penalty.apply(x * 2, self)


def test_a_Function_that_no_node_can_say(dynamo):
    with pytest.raises(ExportError, match="(?s)No function of the file can stand for it: its code catches an error.*__bool__"):
        exporter.export(Whiten(), (torch.randn(2, 3),), dynamo=dynamo)


def test_without_an_eager_run_random_values_are_taken():
    function = function_of(ASKED["class"][0], "backward")
    with pytest.warns(PythonopWarning, match="on the example a graph of it gives"):
        exporter.export(Calls(lambda x: function.apply(x.sin())), (torch.randn(2),), portable=True, eager_check=False)


def fallback_of_model(ask):
    return lambda x: x.sin() * caught(ask)(x)


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda x: x.sum() > 0, "an `if`, or bool\\(\\),"),
        (lambda x: x.sum().item() > 0, "a number read out of a tensor"),
        (lambda x: x.numpy().max() > 0, "\\.numpy\\(\\)"),
    ],
    ids=["branch", "item", "numpy"],
)
def test_a_model_that_catches_what_torch_export_raises_is_warned_of(ask, what):
    slope = function_of(lambda x: 2, "forward")
    with pytest.warns(PythonopWarning, match=f"{what} in module <root> at .*test_proof:.* asks for a value that torch.export has not"):
        exporter.export(Calls(lambda x: slope.apply(fallback_of_model(ask)(x))), (torch.randn(2, 3),))
