"""A sample of `test_combinations.py`: an export by torch.export, five by TorchScript."""

from __future__ import annotations

import pytest

from tests.end_to_end.combinations.check import CASES, USES, outcome
from tests.end_to_end.combinations.known import unexpected

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


def test_the_matrix_is_large_enough():
    assert sum(case.dynamo for case in CASES) > 500
    assert sum(not case.dynamo for case in CASES) > 500
