"""Numbers that a Function returns beside its tensors: those that move with the inputs are of no use to the model, the others are constants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import exporter
from symbolics.errors import Faq


class Returns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, number):
        return x * 2, number(x)

    @staticmethod
    def backward(ctx, g, *_):
        return g * 2, None


def rows(x):
    return x.shape[0]


def elements(x):
    return x.numel()


def whole_shape(x):
    return x.shape


def largest(x):
    return x.abs().max().item()


def all_positive(x):
    return bool((x > 0).all())


def any_positive(x):
    return bool((x > 0).any())


def in_numpy(x):
    return float(np.abs(x.detach().numpy()).sum())


def nested(x):
    return {"scale": [x.std().item(), 3]}


def three(x):
    return 3


def width(x):
    return x.shape[1]


def called(x):
    return "forward"


class Uses(nn.Module):
    def __init__(self, number, use):
        super().__init__()
        self.linear, self.number, self.use = nn.Linear(4, 4), number, use

    def forward(self, x):
        y, number = Returns.apply(self.linear(x), self.number)
        return self.use(y, number)


def divide(y, number):
    return y.sum() / number


def branch(y, number):
    return y if number else y * 10


X = torch.randn(3, 4)
OPEN = {"x": {0: "batch"}}


@pytest.mark.parametrize(
    ("number", "use", "shapes"),
    [
        (rows, divide, OPEN),
        (elements, divide, OPEN),
        (whole_shape, lambda y, shape: y.reshape(shape[0], 2, 2), OPEN),
        (largest, divide, None),
        (all_positive, branch, None),
        (any_positive, branch, None),
        (in_numpy, divide, None),
        (nested, lambda y, found: y * found["scale"][0], None),
        (rows, lambda y, n: y[: n - 1], OPEN),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("portable", [False, True])
def test_one_that_moves_cannot_be_used(dynamo, number, use, shapes, seed, portable):
    torch.manual_seed(seed)
    with pytest.raises(
        exporter.ExportError, match=r"returns a Python value computed from its inputs \(.* in one run, .* in another\)"
    ) as error:
        exporter.export(Uses(number, use), (X,), dynamo=dynamo, dynamic_shapes=shapes, portable=portable)
    assert "called in module <root> at " in str(error.value) and error.value.faq is Faq.PYTHON_VALUE


@pytest.mark.parametrize("number", [largest, in_numpy, rows])
def test_one_that_nobody_uses_stands_in_nobodys_way(dynamo, number):
    program = exporter.export(Uses(number, lambda y, _: y), (X,), dynamo=dynamo, dynamic_shapes=OPEN)
    assert exporter.load(program.model_proto, allow=["tests.*", f"{__name__}:{number.__name__}"])(torch.randn(5, 4)).shape == (5, 4)


@pytest.mark.parametrize(
    ("number", "use", "shapes"),
    [
        (three, divide, OPEN),
        (width, divide, OPEN),
        (rows, divide, None),
        (called, lambda y, text: y if text == "forward" else -y, OPEN),
        (nested, lambda y, found: y * found["scale"][1], OPEN),
    ],
)
def test_one_that_stays_is_a_constant(dynamo, number, use, shapes):
    model = Uses(number, use)
    program = exporter.export(model, (X,), dynamo=dynamo, dynamic_shapes=shapes)
    found = exporter.load(program.model_proto, allow=["tests.*", f"{__name__}:{number.__name__}"])
    for x in (X, -X, torch.randn(5, 4)) if shapes else (X, -X):
        torch.testing.assert_close(found(x), model(x))


@pytest.mark.parametrize(
    "result",
    [lambda y, number: number, lambda y, number: (y, number), lambda y, number: {"y": y, "scale": [number]}],
    ids=["alone", "tuple", "dict"],
)
def test_one_that_moves_is_no_output_of_the_model(dynamo, result):
    says = r"Returns, called in module <root> at .*test_returned_numbers.*: it returns a Python value computed from its inputs.* and the model returns it"
    with pytest.raises(exporter.ExportError, match=says) as error:
        exporter.export(Uses(largest, result), (X,), dynamo=dynamo)
    assert "Unseen" not in str(error.value) and "not x.sum().item()" in str(error.value)
    assert error.value.faq is Faq.PYTHON_VALUE
