"""The whole sweep over spellings."""

from __future__ import annotations

from tests.symbolics.quirks.spellings import FUNCTIONS, sweep


def test_every_spelling_of_every_sample():
    called, tried, wrong = sweep(samples=6)
    assert not wrong, "\n".join(wrong)
    assert len(called) == len(FUNCTIONS)
    assert tried > 6000
