"""Types, control flow and uses crossed, on both exporters, against eager: every case is right, or refused as `known.py` says."""

from __future__ import annotations

import pytest

from tests.end_to_end.combinations.check import CASES, outcome
from tests.end_to_end.combinations.known import unexpected

#: What is exported together is one test: an export serves several uses.
GROUPS = {}
for case in CASES:
    GROUPS.setdefault(" - ".join(str(case).split(" - ")[:-1]), []).append(case)


@pytest.mark.unusable("some are in bfloat16, for which onnxruntime has no kernels")
@pytest.mark.parametrize("group", GROUPS)
def test_combination(group):
    wrong = [text for case in GROUPS[group] if (text := unexpected(case, outcome(case)))]
    assert not wrong, "\n".join(wrong)
