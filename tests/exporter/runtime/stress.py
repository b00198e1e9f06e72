"""Sixteen threads on shared sessions whose Functions keep, fail and return what they like: nothing crashes, nothing is left.

`make asan` runs it with the native library built with the address and undefined-behaviour sanitizers:

    python -m tests.exporter.runtime.stress --steps 20000 --threads 16
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from exporter.runtime.session import Session, inference_session, session_options
from tests.exporter.runtime.build import forward, record, training
from tests.zoo import functions as F, hostile

ALLOW = ["tests.zoo.*"]
SMALL, LARGE = (2, 4), (1 << 14,)  # below and above the size from which inputs are read where they lie


class Stress:
    """The sessions that all threads share, and what a step does with one of them.

    Attributes:
        outcomes: (step, type of what it raised, or "done") -> how often.
    """

    def __init__(self) -> None:
        calm()
        small, large = torch.ones(SMALL, requires_grad=True), torch.ones(LARGE, requires_grad=True)
        parallel = session_options(ALLOW)
        parallel.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
        parallel.inter_op_num_threads = 4
        self.models: dict[str, tuple[onnx.ModelProto, tuple[int, ...]]] = {
            "chain": (training(record(F.SavesInput, small), repeat=5), SMALL),
            "apart": (training(record(F.TwoInputs, small, small, 0.5)), SMALL),
            "large": (training(record(F.SavesIntermediate, large)), LARGE),
            "keeps": (training(record(hostile.Keeps, large)), LARGE),
            "refuses": (forward(record(hostile.Refuses, large)), LARGE),
            "throws": (training(record(hostile.Throws, small), repeat=3), SMALL),
            "turns": (training(record(hostile.Turns, small)), SMALL),
            "numbered": (forward(record(hostile.Numbered, torch.zeros(SMALL))), SMALL),
            "strided": (training(record(hostile.Strided, large)), LARGE),
        }
        self.sessions = {name: inference_session(model, ALLOW) for name, (model, _) in self.models.items()}
        self.parallel = inference_session(self.models["throws"][0], sess_options=parallel)
        self.plain = onnxruntime.InferenceSession(self.models["numbered"][0].SerializeToString(), session_options(ALLOW))
        self.outcomes: collections.Counter[tuple[str, str]] = collections.Counter()
        steps = (self.run, self.run, self.run, self.switch, self.number, self.text, self.asynchronous, self.remake, self.read_kept)
        self.steps: tuple[Callable[[random.Random], Any], ...] = steps

    def step(self, draw: random.Random) -> None:
        chosen = draw.choice(self.steps)
        try:
            chosen(draw)
            outcome = "done"
        except AssertionError:
            raise
        except BaseException as error:  # a Function may raise anything
            outcome = type(error).__name__
        self.outcomes[chosen.__name__, outcome] += 1

    def feeds(self, name: str, draw: random.Random) -> dict[str, np.ndarray]:
        model, shape = self.models[name]
        if draw.random() < 0.05:
            shape = (0, *shape[1:])
        halved = (*shape[:-1], shape[-1] // 2)
        made = {value.name: halved if name == "strided" and value.name == "g0" else shape for value in model.graph.input}
        return {value: np.full(shape, draw.uniform(0.5, 2), np.float32) for value, shape in made.items()}

    def run(self, draw: random.Random) -> None:
        name = draw.choice(list(self.models))
        self.once(self.parallel if name == "throws" and draw.random() < 0.5 else self.sessions[name], name, draw)

    def once(self, session: Session, name: str, draw: random.Random) -> None:
        feeds = self.feeds(name, draw)
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
        try:
            session.run_with_ort_values(None, values)
        finally:
            for array in feeds.values():
                array.fill(-9)  # whoever looks there still sees it

    def switch(self, draw: random.Random) -> None:
        hostile.Keeps.how = draw.choice(["", "", *hostile.KEPT, "saves", "saves a slice", "keeps a gradient"])
        hostile.Refuses.how = draw.choice(["", "refuses"])
        hostile.Throws.how = draw.choice(["", "", *(how for how in hostile.ERRORS if how != "recursion")])
        hostile.Throws.where = draw.choice(["forward", "backward"])
        hostile.Turns.how = draw.choice(["", "", *hostile.TURNS])

    def number(self, draw: random.Random) -> None:
        number = draw.randrange(1, 1 << 20)
        try:
            self.sessions["numbered"].run(None, {"x0": np.full(SMALL, number, np.float32)})
        except LookupError as error:
            assert error.args == (number,), "the exception of another thread"
        else:
            raise AssertionError("a failure is lost")

    def text(self, draw: random.Random) -> None:
        self.plain.run(None, {"x0": np.full(SMALL, draw.randrange(3), np.float32)})

    def asynchronous(self, draw: random.Random) -> None:
        session, done, told = draw.choice([self.sessions["throws"], self.parallel]), threading.Event(), []

        def ended(results: Any, data: Any, error: str) -> None:
            told.append(error)
            done.set()

        session.run_async([value.name for value in session.get_outputs()], self.feeds("throws", draw), ended, None)
        assert done.wait(120), "no callback"
        if told[0]:
            raise RuntimeError(told[0])

    def remake(self, draw: random.Random) -> None:
        """A session of its own: from its second run on it reads inputs where they lie, until one is kept."""
        if draw.random() < 0.2:
            name = draw.choice([*self.models, "keeps", "keeps", "refuses"])
            session = inference_session(self.models[name][0], ALLOW)
            for _ in range(6):
                with contextlib.suppress(BaseException):
                    self.once(session, name, draw)
            assert len(session.store) == 0, "a context is left"

    def read_kept(self, draw: random.Random) -> None:
        kept, hostile.Keeps.kept = hostile.Keeps.kept, []
        for one in kept:
            if isinstance(one, torch.Tensor) and one.dtype is torch.float32 and not one.requires_grad:
                assert not bool((one == -9).any()), "a kept tensor reads memory that is not its own"


def calm() -> None:
    """Let the Functions behave again."""
    hostile.Keeps.how = hostile.Refuses.how = hostile.Throws.how = hostile.Turns.how = ""
    hostile.Keeps.kept = []


def main(steps: int, threads: int, seed: int) -> collections.Counter[tuple[str, str]]:
    """So many steps on so many threads.

    Returns:
        Stress.outcomes.

    Raises:
        AssertionError: An exception was another's or lost, a context is left, or kept memory is not its own.
    """
    onnxruntime.set_default_logger_severity(4)
    stress = Stress()

    def work(thread: int) -> None:
        draw = random.Random(seed * 1000 + thread)
        for _ in range(steps // threads):
            stress.step(draw)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    for session in (*stress.sessions.values(), stress.parallel):
        assert len(session.store) == 0, "a context is left"
        assert not session._pool.entries
        assert not session._binding.errors
    return stress.outcomes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    for (name, outcome), count in sorted(main(**vars(parser.parse_args())).items()):
        print(f"{name:>14} {outcome:<20} {count}")
