"""torch's threads beside onnxruntime's: short calls run on one, long ones on all, and none waits awake where a session runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import onnxruntime
import pytest
import torch

from exporter.runtime.native import _native
from exporter.runtime.native.functions import THREADS
from exporter.runtime.session import inference_session, session_options, threads_outside
from tests.exporter.runtime.build import forward, record, training

ALLOW = [f"{__name__}:*"]
pytestmark = pytest.mark.xfail(not THREADS[0], reason="torch brings no OpenMP whose threads can be counted", strict=True)


_where_threads_wait_awake = pytest.mark.xfail(
    not THREADS[3] or len(os.sched_getaffinity(0)) < 2, reason="libgomp's threads sleep at once, or there is another OpenMP", strict=True
)

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


class Counts(torch.autograd.Function):
    """Notes how many threads it has, and takes as long as told."""

    seen: list[int] = []
    seconds = 0.0
    fails = False
    sets = 0
    asks = None

    @staticmethod
    def forward(ctx, x):
        Counts.seen.append(torch.get_num_threads())
        end = time.thread_time() + Counts.seconds
        while time.thread_time() < end:
            pass
        if Counts.asks:
            Counts.asks()
        if Counts.sets:
            torch.set_num_threads(Counts.sets)
        if Counts.fails:
            raise ValueError("as told")
        return x * 2

    @staticmethod
    def backward(ctx, g):
        Counts.seen.append(torch.get_num_threads())
        return g * 2


@pytest.fixture(autouse=True)
def three_threads(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(Counts, "seen", [])
    yield
    assert torch.get_num_threads() == 3, "a run has changed what its caller set"
    torch.set_num_threads(before)


def _runs(model, count, threads=2):
    Counts.seen.clear()  # of the call that was recorded
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = inference_session(model, ALLOW, sess_options=options)
    x = torch.randn(2).numpy()
    for _ in range(count):
        session.run(None, {value.name: x for value in session.get_inputs()})
    return Counts.seen


def test_short_calls_run_on_one_thread():
    call = record(Counts, torch.randn(2, requires_grad=True))
    assert _runs(training(call), 5) == [1] * 10, "forward and backward"


def test_long_calls_get_all_threads(monkeypatch):
    call = record(Counts, torch.randn(2))
    monkeypatch.setattr(Counts, "seconds", 0.006)
    assert _runs(forward(call), 6) == [1, 1, 1, 3, 3, 3]


def test_a_session_of_one_thread_leaves_torch_all():
    call = record(Counts, torch.randn(2))
    assert _runs(forward(call), 2, threads=1) == [3, 3]


def test_options_of_a_session_of_one_thread_serve_another():
    call = record(Counts, torch.randn(2))
    options = session_options(ALLOW)
    for threads in (1, 2):
        options.intra_op_num_threads = threads
        Counts.seen.clear()
        session = inference_session(forward(call), sess_options=options)
        session.run(None, {value.name: torch.randn(2).numpy() for value in session.get_inputs()})
        assert Counts.seen == [3 if threads == 1 else 1]


def test_to_wait_for_the_gil_is_no_work(monkeypatch):
    """A thread of Python's own has the GIL for 5 ms at a time."""
    call, stop = record(Counts, torch.randn(2)), threading.Event()
    monkeypatch.setattr(Counts, "asks", lambda: time.sleep(0))  # gives it up, as a long operator does

    def busy():
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        assert _runs(forward(call), 8) == [1] * 8
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("number", [1, 2])
def test_a_new_thread_has_torchs_number(number):
    """torch gives it to a thread when that first asks, which is within a call here."""
    call = record(Counts, torch.randn(2))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = inference_session(forward(call), ALLOW, sess_options=options)
    feeds = {value.name: torch.randn(2).numpy() for value in session.get_inputs()}
    torch.set_num_threads(number)
    try:
        Counts.seen.clear()
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(lambda: (session.run(None, feeds), torch.get_num_threads())[1]).result()
    finally:
        torch.set_num_threads(3)
    assert Counts.seen == [1] and found == number


def test_a_session_that_is_made_in_a_call_has_all_threads(monkeypatch):
    monkeypatch.setattr(Counts, "asks", lambda: Counts.seen.append(threads_outside() or torch.get_num_threads()))
    assert _runs(forward(record(Counts, torch.randn(2))), 1) == [1, 3]
    assert threads_outside() == 0


def test_what_raises_leaves_the_number_as_it_was(monkeypatch):
    call = record(Counts, torch.randn(2))
    monkeypatch.setattr(Counts, "fails", True)
    with pytest.raises(ValueError, match="as told"):
        _runs(forward(call), 1)


@_where_threads_wait_awake
def test_threads_of_torch_sleep_before_a_long_run(request):
    x = torch.randn(1 << 20)
    request.addfinalizer(lambda: torch.set_num_threads(3))
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # of more, none waits awake

    def awake(last_run):
        shares = []
        for _ in range(5):
            torch.nn.functional.gelu(x)  # in parallel: its threads wait for more
            _native.put_to_sleep(last_run)
            begin = time.process_time()
            time.sleep(0.002)
            shares.append((time.process_time() - begin) / 0.002)
        return shares  # on a machine with other work one may have had no turn

    assert min(awake(1e9)) < 0.1 < max(awake(0.0)), "a short run is not worth it"


@_where_threads_wait_awake
def test_no_thread_stays_where_it_was_made(request):
    """Threads are made on the processor that the caller is on."""
    x, everywhere = torch.randn(1 << 16), os.sched_getaffinity(0)
    request.addfinalizer(lambda: torch.set_num_threads(3))
    torch.set_num_threads(len(everywhere))
    before = set(os.listdir("/proc/self/task"))  # onnxruntime gives each of its own a place
    for _ in range(20):
        torch.nn.functional.gelu(x)
        _native.put_to_sleep(1e9)
        made = set(os.listdir("/proc/self/task")) - before
        assert made and [os.sched_getaffinity(int(task)) for task in made] == [everywhere] * len(made)
    assert os.sched_getaffinity(0) == everywhere


@pytest.mark.xfail(not hasattr(os, "fork"), reason="no fork", strict=True)
def test_a_forked_process_wakes_no_threads_that_it_has_not():
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], timeout=120, check=False).returncode == 0


def test_a_number_that_a_call_sets_stays(monkeypatch):
    call = record(Counts, torch.randn(2))
    monkeypatch.setattr(Counts, "sets", 2)
    assert _runs(forward(call), 1) == [1]
    assert torch.get_num_threads() == 2
    torch.set_num_threads(3)
