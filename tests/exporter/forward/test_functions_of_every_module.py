"""The rest of tests/exporter/forward/test_functions_of_modules.py: further ways to call a module, and a fresh process."""

from __future__ import annotations

import pytest
import torch

import exporter
from tests.exporter.forward.test_functions_of_modules import ALLOW, BOTH, CASES, SOME, TOKENS, Block, Model, check, in_a_row


@BOTH
@pytest.mark.parametrize("case", [case for case in CASES if case not in SOME])
def test_as_in_eager(case, dynamo, tmp_path):
    check(case, dynamo, tmp_path)


@BOTH
def test_in_a_fresh_process(dynamo):
    torch.manual_seed(0)
    case = exporter.Case(Model([Block(), Block()], in_a_row), (torch.randn(TOKENS),), functions=[Block], allow=tuple(ALLOW))
    report = exporter.verify(case, dynamo=dynamo, setup=f"{__name__}:nothing")
    assert report.ok, report


def nothing():
    """A fresh process has all it needs."""
