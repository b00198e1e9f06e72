"""Branches that the size of an open axis decides: said, by their line."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional

import exporter
from symbolics.errors import PythonopWarning


def greater(x):
    return x * 2 if x.shape[0] > 5 else x * 3


def even(x):
    return x * 3 if x.shape[0] % 2 else x * 2


def checked(x):
    assert x.shape[0] % 2 == 0
    if x.shape[0] < 3:
        raise ValueError("too short")
    return functional.glu(x, 0).reshape(-1, 2, 4)


def known(x):
    return x * 2 if x.shape[1] > 3 else x * 3


class Calling(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def said(function, dynamo):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exporter.export(Calling(function), (torch.randn(12, 4),), dynamo=dynamo, dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    return [
        str(warning.message) for warning in caught if issubclass(warning.category, PythonopWarning) and "a branch" in str(warning.message)
    ]


@pytest.mark.parametrize("function", [greater, even])
def test_a_branch_on_an_open_size_is_said_once(function, dynamo):
    (message,) = said(function, dynamo)
    line = function.__code__.co_firstlineno + 1
    assert f"at {__name__}:{line} depends on the size of an open axis" in message
    assert "torch.cond" in message


@pytest.mark.parametrize("function", [checked, known])
def test_checks_and_known_sizes_are_not(function, dynamo):
    assert said(function, dynamo) == []
