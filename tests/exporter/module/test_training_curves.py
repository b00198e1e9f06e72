"""200 steps of AdamW, eager and loaded file, same data: one curve. The figures: ``python -m benchmarks.training_curves``."""

from __future__ import annotations

import copy

import pytest

from benchmarks import training_curves as figures
from examples.train import TASKS, both, train

pytestmark = pytest.mark.slow


def _task(name):
    return TASKS[name][1]()


@pytest.mark.parametrize("name", TASKS)
def test_in_float64_the_curves_are_one(name, dynamo, tmp_path):
    eager, file, _ = both(figures.in_float64(_task(name)), tmp_path / "model.onnx", dynamo=dynamo)
    assert len(file.losses) == figures.STEPS
    assert eager.losses[-1] < eager.losses[0] / 2, "the learning rate must teach something"
    assert max(figures.distances(file.losses, eager.losses)) < figures.FLOAT64


@pytest.mark.parametrize("name", TASKS)
def test_in_float32_the_curve_is_inside_twice_eagers_envelope(name, tmp_path):
    """Eager against eager with parameters and inputs moved by one ulp, and with other thread counts: five runs each."""
    task = _task(name)
    eager, file, _ = both(task, tmp_path / "model.onnx")
    assert eager.losses[-1] < eager.losses[0] / 2
    assert figures.first_gradients(file, eager) < figures.FIRST_GRADIENTS
    envelopes = [figures.envelope(runs, eager.losses) for runs in (figures.by_ulps(task), figures.by_threads(task))]
    assert figures.beyond(file.losses, eager.losses, *envelopes) == []


def test_a_curve_outside_the_envelope_is_found(tmp_path):
    """A rate that is 1% larger is no rounding."""
    task = _task("bloom")
    steps = 30
    eager = train(copy.deepcopy(task.model), task, steps)
    task.rate *= 1.01
    other = train(copy.deepcopy(task.model), task, steps)
    task.rate /= 1.01
    envelopes = [figures.envelope(runs, eager.losses) for runs in (figures.by_ulps(task, steps), figures.by_threads(task, steps))]
    assert figures.beyond(other.losses, eager.losses, *envelopes)
