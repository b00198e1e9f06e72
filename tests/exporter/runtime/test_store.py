"""Contexts of runs that failed are freed, on whatever thread they were made; those that a result names stay."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from exporter.runtime.session import inference_session, session_options
from exporter.runtime.store import ContextStore, PoolLog
from tests.exporter.runtime.build import forward, record, training
from tests.exporter.runtime.test_session import backward_only
from tests.zoo import functions as F, hostile

ALLOW = ["tests.zoo.*"]
ONES = np.ones((2, 4), np.float32)


@pytest.fixture(autouse=True)
def _quiet():
    onnxruntime.set_default_logger_severity(4)
    yield
    onnxruntime.set_default_logger_severity(2)


def _parallel():
    options = session_options(ALLOW)
    options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.inter_op_num_threads = 4
    return options


def _branches(count=4):
    """So many training pairs side by side, of which the last raises where its input is negative."""
    one = training(record(F.Raises, torch.ones(2, 4, requires_grad=True)))
    good = training(record(F.SavesInput, torch.ones(2, 4, requires_grad=True)))
    model = onnx.ModelProto.FromString(good.SerializeToString())
    del model.graph.node[:], model.graph.output[:], model.graph.value_info[:], model.graph.input[:]
    for i in range(count):
        source = one if i == count - 1 else good
        prefixed = onnx.compose.add_prefix(source, f"b{i}_")
        model.graph.node.extend(prefixed.graph.node)
        model.graph.output.extend(prefixed.graph.output)
        model.graph.value_info.extend(prefixed.graph.value_info)
        model.graph.input.extend(prefixed.graph.input)
    return model


def _feeds(session, *, fail):
    feeds = {value.name: ONES for value in session.get_inputs()}
    last = max(name for name in feeds if name.endswith("x0"))
    return {**feeds, last: -ONES} if fail else feeds


@pytest.mark.parametrize("how", ["run", "values", "vector", "binding", "async"])
@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "sequential"])
def test_a_failed_run_leaves_no_context(parallel, how):
    options = _parallel() if parallel else session_options(ALLOW)
    session = inference_session(_branches(), sess_options=options)
    for _ in range(10):
        _run(session, how, _feeds(session, fail=True))
        assert len(session.store) == 0
    assert _run(session, how, _feeds(session, fail=False)) is None
    assert len(session.store) == 0
    assert not session._pool.entries


def _run(session, how, feeds):
    """The exception of a run, however it is started."""
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in feeds.items()}
    outputs = [value.name for value in session.get_outputs()]
    if how == "async":
        done, failures = threading.Event(), []

        def ended(results, data, error):
            failures.append(error)
            done.set()

        session.run_async(outputs, feeds, ended, None)
        assert done.wait(60)
        return failures[0] or None
    try:
        if how == "run":
            session.run(None, feeds)
        elif how == "values":
            session.run_with_ort_values(None, values)
        elif how == "binding":
            binding = session.io_binding()
            for name, value in values.items():
                binding.bind_ortvalue_input(name, value)
            for name in outputs:
                binding.bind_output(name)
            session.run_with_iobinding(binding)
        else:
            state = onnxruntime.capi.onnxruntime_pybind11_state
            vector, results = state.OrtValueVector(), state.OrtValueVector()
            for value in values.values():
                vector.push_back(value._ortvalue)
            devices = [onnxruntime.OrtDevice.make("cpu", 0)._get_c_device()] * len(outputs)
            session.run_with_ortvaluevector(onnxruntime.RunOptions(), list(values), vector, outputs, results, devices)
    except F.CustomError as error:
        return error
    return None


@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "sequential"])
def test_contexts_that_results_name_are_the_callers(parallel):
    store = ContextStore()
    options = session_options(ALLOW, store=store)
    if parallel:
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
        options.inter_op_num_threads = 4
    x = torch.ones(2, 4, requires_grad=True)
    first = inference_session(forward(record(F.SavesInput, x), context=True), sess_options=options)
    fails = inference_session(_branches(), sess_options=options)
    second = inference_session(backward_only(record(F.SavesInput, x)), ALLOW, store=store)

    def work(_):
        for _ in range(20):
            y, handle = first.run(None, {"x0": ONES})
            with pytest.raises(F.CustomError):
                fails.run(None, _feeds(fails, fail=True))
            (gradient,) = second.run(None, {"context": handle, "g0": ONES, "op0_0": y})
            np.testing.assert_allclose(gradient, np.cos(ONES), rtol=1e-6)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(store) == 0
    results: list[object] = []
    done = threading.Event()
    first.run_async(["op0_0", "op0_context"], {"x0": ONES}, lambda found, *_: (results.extend(found), done.set()), None)
    assert done.wait(60)
    assert len(store) == 1
    second.run(None, {"context": results[1], "g0": ONES, "op0_0": results[0]})
    assert len(store) == 0


def test_a_log_frees_what_no_run_in_progress_can_have_made():
    store = ContextStore()
    log = PoolLog(store)

    def make(handle):
        store.contexts[handle] = ()
        log.entries.append(handle)

    make(1)  # of nobody: it stays
    first = log.begin()
    make(2)
    second = log.begin()
    make(3)
    assert log.add("a", KeyError())
    assert log.end(second, [np.array(3)]) == [3]
    assert set(store.contexts) == {1, 2, 3}
    assert list(log.errors()) == ["a"]
    third = log.begin()
    make(4)
    log.end(first, None)
    assert set(store.contexts) == {1, 3, 4}
    assert not log.errors()
    log.end(third, None)
    assert set(store.contexts) == {1, 3}
    assert not log.entries
    assert not log.add("b", KeyError())


def test_a_context_whose_outputs_cannot_be_written_is_freed_in_a_plain_session_too():
    for fields in ({}, {"inplace": True}):  # the native path, and that of kernels.py
        hostile.Turns.how = ""
        model = forward(record(hostile.Turns, torch.ones(2, 4, requires_grad=True), **fields), context=True)
        for value in model.graph.output:
            if value.name == "op0_1":
                value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
        for device in ("cpu", "borrow"):
            store = ContextStore()
            session = onnxruntime.InferenceSession(model.SerializeToString(), session_options(ALLOW, store=store, device=device))
            if device == "borrow":
                hostile.Turns.how = "100 dimensions"
            with pytest.raises(Exception, match="declares output 2|dimensions"):
                session.run(None, {"x0": ONES})
            assert len(store) == 0
            hostile.Turns.how = ""
