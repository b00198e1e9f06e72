"""Errors of torch that the model's own code catches."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import exporter

CALLS = {
    "view": lambda y: y.view(7, 9),
    "matrix product": lambda y: y @ torch.ones(7, 2),
    "cat": lambda y: torch.cat([y, torch.ones(5, 9)]),
    "linear": lambda y: nn.functional.linear(y, torch.ones(4, 7)),
    "in place": lambda y: y.clone().add_(torch.ones(9)),
    "a module": lambda y: nn.Linear(9, 2)(y),
    "a function in Python": lambda y: nn.functional.layer_norm(y, (9,)),
}


class Tries(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call, self.outer = call, nn.Linear(3, 3)

    def forward(self, x):
        y = self.outer(x).sin()
        try:
            y = self.call(y)
        except RuntimeError:
            y = y * 5
        return self.outer(y)


class Outer(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.inner = Tries(call)

    def forward(self, x):
        return self.inner(x) + self.inner(x * 2)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_torchscript_goes_on(call):
    """torch's tracer ends the process where an error of an operator is caught."""
    model, x = Outer(call), torch.randn(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", exporter.PythonopWarning)  # at these sizes it is always caught
        program = exporter.export(model, (x,), dynamo=False)
    module, other = exporter.load(program), torch.randn(2, 3)
    torch.testing.assert_close(module(other), model(other))
    module(other).sum().backward()
    model(other).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad)


def test_it_is_said_where_sizes_are_open():
    with pytest.warns(
        exporter.PythonopWarning,
        match=r"view\(\) in module inner at .*raises RuntimeError in the example, and the code around it catches that",
    ):
        exporter.export(Outer(CALLS["view"]), (torch.randn(2, 3),), dynamo=False, dynamic_shapes=({0: "batch"},))


def test_it_is_said_once():
    """A function that is written in Python raises what it calls raises."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exporter.export(Tries(CALLS["a function in Python"]), (torch.randn(2, 3),), dynamo=False, dynamic_shapes=({0: "batch"},))
    assert [str(each.message).partition(" ")[0] for each in caught if "raises RuntimeError" in str(each.message)] == ["layer_norm()"]


def test_with_dynamo_the_way_out_works():
    with pytest.raises(exporter.ExportError, match="dynamo=False works: outputs and gradients equal eager's"):
        exporter.export(Outer(CALLS["view"]), (torch.randn(2, 3),))


def test_a_call_that_is_made_again():
    """torch refuses a gradient of `rtol`, which is then stopped: the trace goes on, where it ended the process."""

    class Inverse(nn.Module):
        def forward(self, x, rtol):
            return torch.linalg.pinv(x, rtol=rtol)

    with pytest.raises(exporter.ExportError, match="aten::linalg_pinv, called in module <root>"):
        exporter.export(Inverse(), (torch.ones(2, 3, 3), torch.tensor(1.0)), dynamo=False)
