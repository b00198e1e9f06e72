"""Checks of values: what only raises is passed, with a warning."""

from __future__ import annotations

import pytest
import torch

import exporter
from tests.support import Calls
from tests.symbolics.capture.functions import asserts


def raises(x):
    if x.sum() > 1e6:
        raise ValueError("too large")
    return x * 2


def not_all(x):
    if not (x < 1e6).all():
        message = "too large"
        raise ValueError(message)
    return x * 2


def either(x):
    if x.max() > 1e6 or x.min() < -1e6:
        raise ValueError("too large")
    return x * 2


def both(x):
    if torch.any(x > 1e6) and not torch.any(x < 0):
        raise ValueError("too large")
    return x * 2


def nested(x):
    if (x.max() > 1e6 or x.min() < -1e6) and x.sum() > 0:
        raise ValueError("too large")
    return x * 2


def otherwise(x):
    if (x < 1e6).all():
        y = x * 2
    else:
        raise ValueError("too large")
    return y


def chained(x):
    if not -1e6 < x.sum() < 1e6:
        raise ValueError("too large")
    return x * 2


def of_torch(x):
    torch._assert((x < 1e6).all(), "too large")
    return x * 2


@pytest.mark.parametrize("check", [raises, not_all, either, both, nested, otherwise, asserts, chained, of_torch])
def test_a_check_passes(check):
    x, z = (torch.arange(1.0, 4).requires_grad_() for _ in range(2))
    with pytest.warns(
        exporter.PythonopWarning, match=r"check in module <root> at tests\.symbolics\.capture\.\w+:\d+ depends on the values"
    ):
        module = exporter.load(exporter.export(Calls(check), (x,), dynamo=True))
    y, expected = module(x), check(z)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, z.grad)


def test_a_branch_is_no_check():
    def branches(x):
        if x.sum() > 1e6:
            return x
        return x * 2

    with pytest.raises(Exception, match="data-dependent"):
        exporter.export(Calls(branches), (torch.ones(2),), dynamo=True)
