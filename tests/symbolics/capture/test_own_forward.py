"""A model that asks for its own forward, or for that of its Function, is answered as in eager mode."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch

import exporter
from tests.zoo.functions import Double

QUESTIONS = {
    "signature": lambda m: inspect.signature(m.forward),
    "full signature": lambda m: inspect.getfullargspec(m.forward),
    "number of arguments": lambda m: m.forward.__code__.co_argcount,
    "names": lambda m: m.forward.__code__.co_varnames[: m.forward.__code__.co_argcount],
    "defaults": lambda m: m.forward.__defaults__,
    "annotations": lambda m: m.forward.__annotations__,
    "a method": lambda m: inspect.ismethod(m.forward) and m.forward.__self__ is m and m.forward.__func__ is type(m).forward,
    "qualified name": lambda m: m.forward.__qualname__,
    "source": lambda m: inspect.getsource(m.forward),
    "wrapped": lambda m: hasattr(m.forward, "__wrapped__"),
    "attributes": lambda m: sorted(vars(m).keys() - {"state_dict"}),  # which TorchScript's export asks, in our words
    "Function": lambda m: (inspect.signature(Double.forward), Double.forward.__code__.co_argcount, inspect.signature(Double.apply)),
    "methods of the Function": lambda m: sorted(vars(Double)),
}


TOLD = []  # torch.export takes back what a forward puts into its module


class Asks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x, scale: float = 2.0):
        TOLD.append({name: _answer(question, self) for name, question in QUESTIONS.items()})
        return Double.apply(self.linear(x)) * scale


def _answer(question, model):
    try:
        return repr(question(model))
    except (AttributeError, TypeError, ValueError) as error:
        return repr(error)


@pytest.mark.parametrize("own", [False, True], ids=["of the class", "of its own"])
def test_questions_of_a_forward(dynamo, own):
    model, x = Asks(), torch.randn(2, 3)
    if own:
        model.forward = functools.partial(Asks.forward, model)
    forward = model.forward
    TOLD.clear()
    model(x)
    exporter.export(model, (x,), dynamo=dynamo)
    eager, *others = TOLD
    assert others, "no forward was captured"
    for other in others:
        assert other == eager
    assert model.forward == forward and ("forward" in vars(model)) is own


def test_a_forward_that_raises_leaves_the_model_as_it_was(dynamo):
    class Raises(torch.nn.Module):
        def forward(self, x):
            return x.no_such_method()

    model = Raises()
    with pytest.raises(exporter.ExportError):
        exporter.export(model, (torch.ones(2),), dynamo=dynamo)
    assert "forward" not in vars(model)
