"""dynamo=False: numbers that are made of an open size behind a Function, whose outputs have no sizes in the graph."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import exporter
from tests.zoo.functions import SavesOutput


class Net(nn.Module):
    def __init__(self, made) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(6, 6), made

    def forward(self, x):
        return self.made(SavesOutput.apply(self.linear(x)))


FROZEN = {
    "int of a part": lambda y: y[:, : int(y.shape[1] * 0.25)].mean(1),
    "square root": lambda y: y / math.sqrt(y.shape[1]),
    "ceil": lambda y: y[:, : math.ceil(y.shape[1] / 2)].sum(1),
    "float": lambda y: y.sum(1) / float(y.shape[1]),
    "range": lambda y: sum(y[:, i] for i in range(y.shape[1])),
    "split": lambda y: torch.cat([part * 2 for part in y.split(4, 1)], 1),
    "behind a transpose": lambda y: y.transpose(0, 1).sum(0) / float(y.transpose(0, 1).shape[0]),
    "a branch on all elements": lambda y: y * 2 if y.numel() > 50 else y - 1,
}
FIXED = {
    "the features": lambda y: y / math.sqrt(y.shape[2]),
    "heads of a fixed width": lambda y: y.reshape(y.shape[0], y.shape[1], 2, int(y.shape[2]) // 2),
    "open, and computed": lambda y: y.sum(1) / y.shape[1],
    "a branch on the features": lambda y: y * 2 if y.shape[2] > 4 else y,
}
SIZES = {"x": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}


def said(made, portable):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exporter.export(Net(made), (torch.randn(2, 8, 6),), dynamo=False, portable=portable, dynamic_shapes=SIZES)
    return [
        str(each.message)
        for each in caught
        if issubclass(each.category, exporter.PythonopWarning) and "SavesOutput" not in str(each.message)
    ]


@pytest.mark.parametrize("portable", [False, True], ids=["PythonOp", "portable"])
@pytest.mark.parametrize("made", FROZEN.values(), ids=FROZEN)
def test_a_number_of_an_open_size_is_said(made, portable):
    (text,) = said(made, portable)
    assert "open axis" in text and "test_sizes_behind_functions:" in text


@pytest.mark.parametrize("portable", [False, True], ids=["PythonOp", "portable"])
@pytest.mark.parametrize("made", FIXED.values(), ids=FIXED)
def test_a_number_of_a_fixed_size_is_not(made, portable):
    assert said(made, portable) == []
