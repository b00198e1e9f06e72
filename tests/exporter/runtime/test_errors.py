"""What a Function raises reaches the caller of a session as it was, from any number of threads, and waits for nobody."""

from __future__ import annotations

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest
import torch

import exporter
from exporter.runtime.reference import reference_evaluator
from exporter.runtime.session import inference_session, session_options
from tests.exporter.runtime.build import forward, record, training
from tests.zoo import functions as F, hostile

ALLOW = ["tests.zoo.*"]
GRAD = np.ones((2, 4), np.float32)


@pytest.fixture(autouse=True)
def _quiet():
    # Every failure is a line of onnxruntime's log.
    onnxruntime.set_default_logger_severity(4)
    yield
    onnxruntime.set_default_logger_severity(2)
    hostile.Throws.how = ""
    hostile.Throws.raised = None


def _throws():
    hostile.Throws.how = ""
    return training(record(hostile.Throws, torch.ones(2, 4, requires_grad=True)))


def test_what_is_raised_is_not_printed_as_well(capfd):
    onnxruntime.set_default_logger_severity(2)
    x = torch.tensor([1.0], requires_grad=True)
    model = forward(record(F.Raises, x))
    with pytest.raises(exporter.TrustError):
        inference_session(model)
    with pytest.raises(F.CustomError):
        inference_session(model, ALLOW).run(None, {"x0": np.array([-1.0], np.float32)})
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("make", [inference_session, reference_evaluator])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("how", hostile.ERRORS)
def test_whatever_is_raised_arrives(how, where, make):
    session = make(_throws(), ALLOW)
    hostile.Throws.how, hostile.Throws.where = how, where
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        session.run(None, {"x0": GRAD, "g0": GRAD})
    if how == "recursion":
        assert type(caught.value) is RecursionError
    else:
        assert caught.value is hostile.Throws.raised
    assert len(session.store) == 0
    hostile.Throws.how = ""
    session.run(None, {"x0": GRAD, "g0": GRAD})


@pytest.mark.parametrize("how", ["a lone surrogate", "a NUL", "no text"])
def test_a_plain_session_tells_the_text_of_any_exception(how):
    model = forward(record(hostile.Throws, torch.ones(2, 4)))
    session = onnxruntime.InferenceSession(model.SerializeToString(), session_options(ALLOW))
    hostile.Throws.how, hostile.Throws.where = how, "forward"
    with pytest.raises(Exception, match=r"PythonOp 'op0' \(tests.zoo.hostile:Throws\)(.|\n)*Traceback(.|\n)*(ValueError|Silent)"):
        session.run(None, {"x0": GRAD})


@pytest.mark.parametrize("name", ["a\0b", "[pythonop-error-1]", "x" * 100_000], ids=["NUL", "token", "long"])
def test_no_name_of_a_node_hides_the_exception(name):
    model = forward(record(F.Raises, torch.ones(2, 4)))
    model.graph.node[0].name = name
    session = inference_session(model, ALLOW)
    with pytest.raises(F.CustomError):
        session.run(None, {"x0": -GRAD})


def test_the_title_has_the_beginning_of_a_long_name():
    model = forward(record(F.Raises, torch.ones(2, 4)))
    model.graph.node[0].name = "x" * 600
    session = onnxruntime.InferenceSession(model.SerializeToString(), session_options(ALLOW))
    with pytest.raises(Exception, match=r"PythonOp 'xxx[^']*…'"):
        session.run(None, {"x0": -GRAD})


def test_no_exception_is_lost_among_threads():
    session = inference_session(forward(record(hostile.Numbered, torch.zeros(2, 4))), ALLOW)

    def work(thread):
        for run in range(60):
            number = 1 + thread * 1000 + run
            with pytest.raises(LookupError) as caught:
                session.run(None, {"x0": np.full((2, 4), number, np.float32)})
            assert caught.value.args == (number,)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert not session._binding.errors


def test_no_exception_is_lost_among_threads_of_a_pool():
    options = session_options(ALLOW)
    options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.inter_op_num_threads = 4
    session = inference_session(forward(record(hostile.Numbered, torch.zeros(2, 4))), sess_options=options)

    def work(thread):
        for run in range(30):
            number = 1 + thread * 1000 + run
            with pytest.raises(LookupError) as caught:
                session.run(None, {"x0": np.full((2, 4), number, np.float32)})
            assert caught.value.args == (number,)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work, range(12)))
    assert not session._binding.errors
    assert not session._pool.entries


def test_an_exception_of_a_plain_session_waits_for_a_few_others_only():
    options = session_options(ALLOW)
    session = onnxruntime.InferenceSession(forward(record(hostile.Numbered, torch.zeros(2, 4))).SerializeToString(), options)
    numbers = range(5_000_000, 5_000_100)
    for number in numbers:
        with pytest.raises(Exception, match="LookupError"):
            session.run(None, {"x0": np.full((2, 4), number, np.float32)})
    alive = [one for one in gc.get_objects() if type(one) is LookupError and one.args[0] in numbers]
    assert len(alive) <= 8


def test_an_exception_that_nobody_asked_for_goes_with_its_run():
    """A Function may run a plain session on the same store, and catch what it raises."""
    options = session_options(ALLOW)
    Catches.inner = onnxruntime.InferenceSession(forward(record(hostile.Numbered, torch.zeros(2, 4))).SerializeToString(), options)
    Catches.seen = []
    model = forward(record(Catches, torch.zeros(2, 4)))
    session = inference_session(model, [Catches])
    session.run(None, {"x0": GRAD})
    assert Catches.seen
    failing = inference_session(forward(record(F.Raises, torch.ones(2, 4))), ALLOW)
    with pytest.raises(F.CustomError) as caught:
        failing.run(None, {"x0": -GRAD})
    gone = weakref.ref(caught.value)
    del caught
    gc.collect()
    assert gone() is None


class Catches(torch.autograd.Function):
    inner = None
    seen: list[str] = []

    @staticmethod
    def forward(ctx, x):
        if Catches.inner is not None and bool(x.any()):
            try:
                Catches.inner.run(None, {"x0": np.full((2, 4), 77, np.float32)})
            except Exception as error:
                Catches.seen.append(str(error))
        return x * 2


class Interrupted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        raise KeyboardInterrupt("first")


def test_ctrl_c_while_an_exception_is_written_down(monkeypatch):
    """The second one is raised, not an error of onnxruntime's, and nothing is left."""
    session = inference_session(training(record(Interrupted, torch.ones(2, 4, requires_grad=True))), [Interrupted])
    feeds = {value.name: GRAD for value in session.get_inputs()}
    binding, left = session._binding, ["third", "second"]
    failed = type(binding).failed

    def interrupted(self, kernel, error):
        if left:
            raise KeyboardInterrupt(left.pop())
        return failed(self, kernel, error)

    monkeypatch.setattr(type(binding), "failed", interrupted)
    with pytest.raises(KeyboardInterrupt, match="third"):
        session.run(None, feeds)
    assert not left and not len(session.store) and not session.store.runs


def test_a_run_that_ctrl_c_has_ended_is_no_outer_run():
    """Between two lines of ours: the entry of the run stays, and the next run is not inside of it."""
    session = inference_session(training(record(F.SavesInput, torch.ones(2, 4, requires_grad=True))), ALLOW)
    feeds = {value.name: GRAD for value in session.get_inputs()}

    def ends():
        made, new = session.store.enter(sys._getframe())
        assert new and session.store.running()
        made.append(7)
        session.store.contexts[7] = ()

    ends()
    assert session.store.runs
    assert not session.store.running()
    assert not session.store.runs and not len(session.store)
    ends()
    session.run(None, feeds)
    assert not session.store.runs and not len(session.store)
