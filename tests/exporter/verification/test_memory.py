"""The memory of a step: what it takes, and nothing of what was there before."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from exporter.verification import memory
from exporter.verification.memory import HighWater
from exporter.verification.steps import measured
from tests.processes import python

MIB = 2**20

linux = pytest.mark.xfail(not sys.platform.startswith("linux"), reason="only Linux says what is resident", strict=False)


def _touched(mib):
    return np.ones(mib * MIB, np.uint8)


def a_step_takes_what_it_touches(mib):
    before = _touched(100)
    high_water = HighWater()
    _, used = measured(lambda: _touched(mib), 2, high_water)
    assert mib * MIB * 0.95 < used < (mib + 4) * MIB
    assert before.any()


def what_earlier_work_freed_is_no_gift():
    """Small blocks come from the heap, which the C library does not hand back by itself."""
    holes = [bytearray(4000) for _ in range(20_000)]
    last = bytearray(4000)  # keeps the end of the heap
    del holes
    _, used = measured(lambda: [bytearray(4000) for _ in range(20_000)], 1, HighWater())
    assert used > 60 * MIB
    assert last is not None


def what_warms_up_counts_only_where_it_stays():
    high_water, kept = HighWater(), []
    kept.append(_touched(20))
    _touched(200)
    _, used = measured(lambda: _touched(10), 2, high_water)
    assert 29 * MIB < used < 36 * MIB


@linux
@pytest.mark.parametrize(
    "call",
    [f"a_step_takes_what_it_touches({mib})" for mib in (8, 48, 200)]
    + ["what_earlier_work_freed_is_no_gift()", "what_warms_up_counts_only_where_it_stays()"],
)
def test_in_a_process_of_its_own(call):
    """What other tests have left in the heap of this one is theirs."""
    done = python("-c", f"from tests.exporter.verification import test_memory; test_memory.{call}")
    assert done.returncode == 0, done.stderr


def test_a_system_that_does_not_say_leaves_it_open(monkeypatch):
    monkeypatch.setattr(memory, "_SELF", Path("/nowhere"))
    seconds, used = measured(lambda: None, 3, HighWater())
    assert used is None
    assert seconds >= 0
