"""Numbers drawn from Python's and NumPy's generators: what a forward draws itself is named, what a Function draws is drawn again by its node."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch

import exporter
from symbolics.capture.draws import Draws
from symbolics.errors import PythonopWarning
from tests.symbolics.capture.test_taken_values import Net


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * (random.random() + np.random.rand())

    @staticmethod
    def backward(ctx, g):
        return g


@pytest.mark.parametrize(
    ("how", "named"),
    [
        (lambda x: x * random.random(), "by random,"),
        (lambda x: x * float(np.random.rand()), "by numpy.random,"),
        (lambda x: Noisy.apply(x) * random.uniform(1, 2) * float(np.random.normal()), "by random and numpy.random,"),
        (lambda x: Noisy.apply(x) + torch.rand(()), ""),
    ],
    ids=["python", "numpy", "beside a Function", "in a Function alone"],
)
def test_what_forward_draws_itself_is_named(how, named, dynamo):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exporter.export(Net(how), (torch.randn(2, 3),), dynamo=dynamo)
    said = [one for one in caught if issubclass(one.category, PythonopWarning) and "forward draws numbers" in str(one.message)]
    assert [named in str(one.message) for one in said] == [True] * bool(named)


def test_a_draw_before_and_after_what_runs_apart_counts():
    draws = Draws()
    with draws.apart():
        random.random()
    draws.look()
    assert draws.sources == []
    np.random.rand()
    with draws.apart():
        random.random()
    random.random()
    draws.look()
    assert draws.sources == ["numpy.random", "random"]
