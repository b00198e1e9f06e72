"""torch's threads beside onnxruntime's: short calls run on one, long ones on all, and none waits awake where the other's work."""

from __future__ import annotations

import itertools
import os
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from exporter.runtime import tensors
from exporter.runtime.library import threads_outside
from exporter.runtime.native import _native
from exporter.runtime.native.functions import THREADS
from exporter.runtime.session import inference_session, open_options, session_options
from exporter.runtime.tensors import Runner
from tests.exporter.runtime.build import forward, record, training

ALLOW = [f"{__name__}:*"]
pytestmark = pytest.mark.xfail(not THREADS[0], reason="torch brings no OpenMP whose threads can be counted", strict=True)


_where_threads_wait_awake = pytest.mark.xfail(
    not THREADS[3] or len(os.sched_getaffinity(0)) < 2, reason="libgomp's threads sleep at once, or there is another OpenMP", strict=True
)


class Counts(torch.autograd.Function):
    """Notes how many threads it has, and takes as long as told: on one thread, and on several where that is another time."""

    seen: list[int] = []
    seconds = 0.0
    seconds_together = None
    fails = False
    sets = 0
    asks = None

    @staticmethod
    def forward(ctx, x):
        Counts.seen.append(torch.get_num_threads())
        alone = Counts.seconds_together is None or torch.get_num_threads() == 1
        end = time.thread_time() + (Counts.seconds if alone else Counts.seconds_together)
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


def _opened(model, threads=2, options=None, **entries):
    """A session of so many threads, and what it takes; ``entries`` of its options without the ``session.``, ``options`` of `open_options`."""
    Counts.seen.clear()  # of the call that was recorded
    chosen = onnxruntime.SessionOptions() if options is None else options
    chosen.intra_op_num_threads = threads
    for key, value in entries.items():
        chosen.add_session_config_entry(f"session.{key}", value)
    session = inference_session(model, ALLOW if options is None else (), sess_options=chosen)
    return session, {value.name: np.ones(2, np.float32) for value in session.get_inputs()}


def _runs(model, count, threads=2, options=None):
    session, feeds = _opened(model, threads, options)
    for _ in range(count):
        session.run(None, feeds)
    return Counts.seen


def test_short_calls_run_on_one_thread():
    call = record(Counts, torch.randn(2, requires_grad=True))
    assert _runs(training(call), 5) == [1] * 10, "forward and backward"


def _takes(monkeypatch, seconds, together=None):
    monkeypatch.setattr(Counts, "seconds", seconds)
    monkeypatch.setattr(Counts, "seconds_together", together)


def test_long_calls_get_all_threads(monkeypatch):
    call = record(Counts, torch.randn(2))
    _takes(monkeypatch, 0.03, 0.001)
    assert _runs(forward(call), 10) == [1, 1, 1, *[3] * 7]


def test_long_calls_that_gain_nothing_go_back_to_one(monkeypatch):
    """And are tried again, each time after twice as many calls."""
    call = record(Counts, torch.randn(2))
    _takes(monkeypatch, 0.002)
    assert _runs(forward(call), 120) == [1] * 3 + [3] * 3 + [1] * (32 + 3) + [3] * 3 + [1] * (64 + 3) + [3] * 3 + [1] * 6


@pytest.mark.parametrize(
    ("alone", "together", "expected"),
    [([0.04, 0.01, 0.04], [0.02] * 3, 1), ([0.02] * 3, [0.001, 0.04, 0.04], 3), ([0.02] * 3, [0.04, 0.001, 0.04], 3)],
)
def test_the_quickest_call_of_either_kind_counts(monkeypatch, alone, together, expected):
    call, turns = record(Counts, torch.randn(2)), iter([*alone[1:], *together, 0.0])
    _takes(monkeypatch, alone[0])
    monkeypatch.setattr(Counts, "asks", lambda: _takes(monkeypatch, next(turns, 0.0)))
    assert _runs(forward(call), 7) == [1, 1, 1, 3, 3, 3, expected]


@pytest.mark.parametrize(
    ("later", "expected"),
    [(0.002, [1] + [3] * 3 + [1] * 2), (0.0, [1] * 4 + [3] * 2), (0.012, [1] + [3] * 3 + [3] * 2)],
    ids=["quicker", "short", "as long"],
)
def test_one_thread_is_tried_again(monkeypatch, later, expected):
    """Its first calls may have had a busy moment. The quickest of all counts. With no gain anew, after twice as many calls."""
    call, turns = record(Counts, torch.randn(2)), iter([0.012] * 2 + [0.004] * (3 + 4) + [later])
    _takes(monkeypatch, 0.012)
    monkeypatch.setattr(Counts, "asks", lambda: _takes(monkeypatch, next(turns, 0.004)))
    assert _runs(forward(call), 3 + 3 + 4 + 6) == [1] * 3 + [3] * (3 + 4) + expected


def test_one_thread_is_tried_less_and_less(monkeypatch):
    call = record(Counts, torch.randn(2))
    _takes(monkeypatch, 0.01, 0.002)
    assert _runs(forward(call), 47) == [1] * 3 + [3] * (3 + 4) + [1] + [3] * (3 + 8) + [1] + [3] * (3 + 16) + [1] + [3] * 4


def test_a_gain_that_was_none_counts_from_the_start(monkeypatch):
    """One call on one thread was quicker than those before it."""
    times = [0.01] * 2 + [0.004] * 7 + [0.003] + [0.004] * 3 + [0.003] * 32 + [0.02] * 3 + [0.004] * 7 + [0.02]
    call, turns = record(Counts, torch.randn(2)), iter(times)
    _takes(monkeypatch, 0.01)
    monkeypatch.setattr(Counts, "asks", lambda: _takes(monkeypatch, next(turns, 0.0)))
    assert _runs(forward(call), len(times) + 1) == [1] * 3 + [3] * 7 + [1] + [3] * 3 + [1] * (32 + 3) + [3] * 7 + [1]


@pytest.mark.parametrize(("together", "expected"), [(0.0085, 1), (0.0065, 3)])
def test_a_gain_is_a_quarter(monkeypatch, together, expected):
    call = record(Counts, torch.randn(2))
    _takes(monkeypatch, 0.01, together)
    assert _runs(forward(call), 9) == [1] * 3 + [3] * 3 + [expected] * 3


def test_calls_are_long_where_one_follows_the_other(monkeypatch):
    call, turns = record(Counts, torch.randn(2)), itertools.cycle([0.006, 0.0, 0.006])
    monkeypatch.setattr(Counts, "asks", lambda: _takes(monkeypatch, next(turns)))
    assert _runs(forward(call), 13) == [1] * 13


def _share_of_a_pause(monkeypatch, spinning):
    """What other threads compute while a long call, behind a product of onnxruntime's, sleeps for some milliseconds; of one processor."""
    helper, shares = onnx.helper, []

    def pause():
        if torch.get_num_threads() > 1:
            begin, length = time.process_time(), 0.004
            time.sleep(length)
            shares.append((time.process_time() - begin) / length)

    call = record(Counts, torch.randn(512, 512))
    _takes(monkeypatch, 0.03, 0.001)
    monkeypatch.setattr(Counts, "asks", pause)
    model = forward(call)
    (given,) = model.graph.input
    product = helper.make_node("MatMul", ["left", "left"], [given.name])
    model.graph.node.insert(0, product)
    given.name = "left"
    session, _ = _opened(model, **{"intra_op.allow_spinning": spinning})
    x = torch.randn(512, 512).numpy()
    for _ in range(12):
        session.run(None, {"left": x})
    return shares


@_where_threads_wait_awake
@pytest.mark.parametrize("spinning", ["0", "1"])
def test_onnxruntimes_threads_sleep_while_a_long_call_computes(monkeypatch, spinning):
    shares = _share_of_a_pause(monkeypatch, spinning)
    assert len(shares) == 8 and sorted(shares)[4] < 0.3, shares


class Works(torch.autograd.Function):
    """Computes by torch's threads."""

    @staticmethod
    def forward(ctx, x):
        Counts.seen.append(torch.get_num_threads())
        return torch.nn.functional.gelu(torch.nn.functional.gelu(x))

    @staticmethod
    def backward(ctx, g):
        return g


class Pauses(torch.autograd.Function):
    """Notes what other threads compute meanwhile, of one processor."""

    shares: list[float] = []

    @staticmethod
    def forward(ctx, x):
        begin, length = time.process_time(), 0.003
        time.sleep(length)
        Pauses.shares.append((time.process_time() - begin) / length)
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g


@_where_threads_wait_awake
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_of_torch_sleep_after_a_long_call(monkeypatch, request, threads):
    """Where onnxruntime has one thread, nobody needs the processor."""
    x = torch.randn(1 << 20)
    model, pauses = forward(record(Works, x)), forward(record(Pauses, x))
    (node,) = pauses.graph.node
    node.name, node.input[0], node.output[0], node.output[1] = "pause", model.graph.output[0].name, "", "paused"
    model.graph.output[0].name = "paused"
    model.graph.node.append(node)
    request.addfinalizer(lambda: torch.set_num_threads(3))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    options = open_options(ALLOW, None, long={record(Works, x).name})
    session, _ = _opened(model, threads, options, **{"intra_op.allow_spinning": "0"})
    monkeypatch.setattr(Pauses, "shares", [])
    for _ in range(9):
        session.run(None, {model.graph.input[0].name: x.numpy()})
    shares = sorted(Pauses.shares)  # where other work has the processor, threads that are awake look asleep
    assert shares[4] < 0.3 if threads > 1 else shares[-1] > 0.3, shares


def test_a_long_call_may_run_another_session(monkeypatch):
    """Of onnxruntime's own, whose loop is one within a loop."""
    parsed = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 20]> g (float[n, n] x) => (float[n, n] y) { y = MatMul(x, x) }')
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    inner = onnxruntime.InferenceSession(parsed.SerializeToString(), options)
    x, found = torch.randn(512, 512).numpy(), []
    call = record(Counts, torch.randn(2))
    _takes(monkeypatch, 0.03, 0.001)
    monkeypatch.setattr(Counts, "asks", lambda: found.append((torch.get_num_threads(), inner.run(None, {"x": x})[0])))
    _runs(forward(call), 10)
    assert [threads for threads, _ in found] == [1, 1, 1, *[3] * 7]
    for _, y in found:
        np.testing.assert_allclose(y, x @ x, rtol=1e-3, atol=1e-3)


def test_more_threads_than_processors_may_take_all_tasks(monkeypatch):
    """With a dynamic block base, all of onnxruntime's threads join: the caller may find nothing to do."""
    call = record(Counts, torch.randn(2))
    _takes(monkeypatch, 0.006, 0.001)
    for base in ("1", "4"):
        session, feeds = _opened(forward(call), 8, dynamic_block_base=base)
        for _ in range(40):
            assert session.run(None, feeds)[0].tolist() == [2.0, 2.0]
        assert Counts.seen[:6] == [1, 1, 1, 3, 3, 3]


def test_a_long_call_may_wait_for_what_onnxruntimes_threads_do(monkeypatch):
    call, ended = record(Counts, torch.randn(2)), threading.Event()
    _takes(monkeypatch, 0.006, 0.001)
    session, feeds = _opened(forward(call))
    for _ in range(5):
        session.run(None, feeds)

    def wait():
        monkeypatch.setattr(Counts, "asks", None)
        session.run_async(None, feeds, lambda results, data, error: ended.set(), None)
        assert ended.wait(20)

    monkeypatch.setattr(Counts, "asks", wait)
    session.run(None, feeds)
    assert ended.is_set() and 3 in Counts.seen


@_where_threads_wait_awake
def test_threads_of_a_caller_that_had_none_run_everywhere(monkeypatch, request):
    """torch's are made when they are put to sleep, if the Function computed nothing by them."""
    call, everywhere = record(Counts, torch.randn(2)), os.sched_getaffinity(0)
    request.addfinalizer(lambda: torch.set_num_threads(3))
    torch.set_num_threads(len(everywhere))
    _takes(monkeypatch, 0.006, 0.001)
    session, feeds = _opened(forward(call))
    before = set(os.listdir("/proc/self/task"))

    def runs():
        for _ in range(8):
            session.run(None, feeds)
        return [os.sched_getaffinity(int(task)) for task in set(os.listdir("/proc/self/task")) - before]

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(runs).result()
    assert len(found) > len(everywhere) and found == [everywhere] * len(found)


def test_a_long_call_may_run_its_own_session(monkeypatch):
    call = record(Counts, torch.randn(2))
    session, feeds = _opened(forward(call))
    depth, found = [], []

    def again():
        if len(depth) < 2:
            depth.append(0)
            found.append(session.run(None, feeds)[0].tolist())
            depth.pop()

    _takes(monkeypatch, 0.03, 0.001)
    monkeypatch.setattr(Counts, "asks", again)
    for _ in range(4):
        assert session.run(None, feeds)[0].tolist() == [2.0, 2.0]
    assert found == [[2.0, 2.0]] * 8 and 3 in Counts.seen


def test_long_calls_of_several_threads_and_sessions(monkeypatch):
    call = record(Counts, torch.randn(2))
    _takes(monkeypatch, 0.002, 0.0006)
    (first, feeds), (second, _) = (_opened(forward(call)) for _ in range(2))
    sessions = [first, second]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: sessions[i % 2].run(None, feeds)[0].tolist(), range(100)))
    assert found == [[2.0, 2.0]] * 100


def test_what_a_long_call_raises_ends_its_run_alone(monkeypatch):
    call = record(Counts, torch.randn(2))
    _takes(monkeypatch, 0.03, 0.001)
    session, feeds = _opened(forward(call))
    for fails in [False] * 5 + [True, False] * 3:
        monkeypatch.setattr(Counts, "fails", fails)
        if fails:
            with pytest.raises(ValueError, match="as told"):
                session.run(None, feeds)
        else:
            session.run(None, feeds)
    assert Counts.seen == [1, 1, 1, *[3] * 7, 1]


def test_a_session_of_one_thread_leaves_torch_all():
    call = record(Counts, torch.randn(2))
    assert _runs(forward(call), 2, threads=1) == [3, 3]


def test_functions_that_are_said_to_be_long_have_all_threads_for_good():
    call = record(Counts, torch.randn(2))
    assert _runs(forward(call), 8, options=open_options(ALLOW, None, long={call.name})) == [3] * 8


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
    """A thread of Python's own has the GIL for 5 ms at a time. Once in five times suffices: of a virtual processor, what its host takes counts."""
    call, stop = record(Counts, torch.randn(2)), threading.Event()
    monkeypatch.setattr(Counts, "asks", lambda: time.sleep(0))  # gives it up, as a long operator does

    def busy():
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        assert any(_runs(forward(call), 8) == [1] * 8 for _ in range(5))
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("number", [1, 2])
def test_a_new_thread_has_torchs_number(number):
    """torch gives it to a thread when that first asks, which is within a call here."""
    call = record(Counts, torch.randn(2))
    session, feeds = _opened(forward(call))
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


@pytest.mark.parametrize(
    ("took", "told"),
    [
        ([50, 1, 1, 9, 1, 1], [0, 50, 1, 1, 1.25, 1]),  # the first one is cold; one that waits for a processor is no long one
        ([9, 1, 9, 9, 9, 9, 9, 9], [0, 9, 1, 1.25, 1.5625, 1.953125, 2.44140625, 3.0517578125]),  # of another batch, say: it shows
        ([9, 10, 8, 10], [0, 9, 10, 8]),
    ],
)
def test_one_slow_run_makes_no_long_ones(took, told, monkeypatch):
    seen, clock = [], itertools.chain.from_iterable((0.0, seconds / 1000) for seconds in took)
    session = inference_session(forward(record(Counts, torch.randn(2))), ALLOW)
    monkeypatch.setattr(tensors, "put_to_sleep", lambda last: seen.append(last * 1000))
    runner = Runner(session, torch.device("cpu"), after_torch=True)
    monkeypatch.setattr(tensors, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    for _ in took:
        runner.run_owning([torch.randn(2)])
    assert seen == pytest.approx(told)


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


def test_a_number_that_a_call_sets_stays(monkeypatch):
    call = record(Counts, torch.randn(2))
    monkeypatch.setattr(Counts, "sets", 2)
    assert _runs(forward(call), 1) == [1]
    assert torch.get_num_threads() == 2
    torch.set_num_threads(3)
