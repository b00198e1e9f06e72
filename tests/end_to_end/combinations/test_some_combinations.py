"""A sample of `test_combinations.py`: an export by torch.export, five by TorchScript."""

from __future__ import annotations

import pytest
import torch

import exporter
from tests.end_to_end.combinations.check import CASES, USES, outcome
from tests.end_to_end.combinations.known import unexpected
from tests.end_to_end.combinations.models import Model, inputs

SAMPLE = {
    "dynamo - float32 - cond in scan - function": {"weighted", "first output alone", "retained", "second call", "training file"},
    "torchscript - float16 - If in Loop - function": USES,
}


@pytest.mark.parametrize("group", SAMPLE)
def test_combination(group):
    wrong = [
        text for case in CASES if str(case) in {f"{group} - {use}" for use in SAMPLE[group]} and (text := unexpected(case, outcome(case)))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.usefixtures("quick_verify")
def test_in_a_process_of_its_own():
    """The model has a scripted function, which Python cannot copy."""
    model = Model("If in Loop", True, frozenset({"tied", "frozen"}), dynamo=False, plain=False, autocast=False)
    report = exporter.verify(model, inputs(0, torch.float32, 1.0), dynamo=False)
    assert report.ok, report


def test_the_matrix_is_large_enough():
    assert sum(case.dynamo for case in CASES) > 500
    assert sum(not case.dynamo for case in CASES) > 500
