"""A process that was forked has none of the threads that its parent woke."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from exporter.runtime.native.functions import THREADS

pytestmark = pytest.mark.xfail(not THREADS[0], reason="torch brings no OpenMP whose threads can be counted", strict=True)

FORKS = """
import os, signal, sys, torch
import exporter.runtime.session
from exporter.runtime.native import _native
torch.set_num_threads(len(os.sched_getaffinity(0)))
torch.nn.functional.gelu(torch.randn(1 << 20))
if os.fork() == 0:
    signal.alarm(20)
    _native.put_to_sleep(1e9)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.xfail(not hasattr(os, "fork"), reason="no fork", strict=True)
def test_a_forked_process_wakes_no_threads_that_it_has_not():
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], timeout=120, check=False).returncode == 0
