"""What a loaded module costs beside what it runs: small calls, the first call, and the imports before it.

    python -m benchmarks.loaded

Two Linear and a Function at batch 3, where what is computed is nothing and what is around it all: a training step over eager's, a
call without gradients over session.run of the same file. They take turns in one process; ratios of medians, processor time. The
first call makes the plan and its sessions. The first touch of a name is measured in fresh processes, above ``import torch``.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

import exporter
from benchmarks._report import Figure, tell
from benchmarks.dispatch import Scale, alternate
from benchmarks.gradient_graph import gpt2

#: name -> the most that its first touch may take, in seconds; None: told for orientation.
TOUCHED = {"export": 0.3, "load": None, "inference_session": None, "hook": None}
STEP, CALL, FIRST_CALL = 3.0, 3.0, 1.5


class Small(nn.Module):
    """Two Linear and a Function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) -> (batch, 4)"""
        return self.second(Scale.apply(self.first(x)))


def small_calls(rounds: int) -> list[Figure]:
    """Steps and calls of the small model."""
    model, x = Small(), torch.randn(3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = exporter.export(model, (x,))
    loaded = exporter.load(program, allow=[Scale])
    session = exporter.inference_session(program, allow=[Scale])
    feeds = {session.get_inputs()[0].name: x.numpy()}

    def step(module: nn.Module) -> Callable[[], None]:
        parameters = list(module.parameters())

        def run() -> None:
            module(x).sum().backward()
            for parameter in parameters:
                parameter.grad = None

        return run

    def call(module: nn.Module) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                module(x)

        return run

    sides = {
        "eager step": step(model),
        "step": step(loaded),
        "eager call": call(model),
        "call": call(loaded),
        "session.run": lambda: session.run(None, feeds),
    }
    us = {name: seconds * 1e6 for name, seconds in alternate(sides, 20, rounds).items()}
    return [
        Figure("training step / eager", us["step"] / us["eager step"], "ratio", STEP, rounds, f"{us['step']:.0f} us"),
        Figure("call without gradients / session.run", us["call"] / us["session.run"], "ratio", CALL, rounds, f"{us['call']:.0f} us"),
        Figure("call without gradients / eager", us["call"] / us["eager call"], "ratio", None, rounds, f"{us['eager call']:.0f} us"),
    ]


def first_call(runs: int) -> Figure:
    """From the first call in training to its outputs: gradient graph, partition, two sessions, one run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = gpt2(12)
    ids, times = torch.zeros(2, 16, dtype=torch.int64), []
    for _ in range(runs):
        module = exporter.load(model.clone())
        begin = time.process_time()
        module(ids)
        times.append(time.process_time() - begin)
    return Figure("GPT-2, 12 layers: first call", statistics.median(times), "s", FIRST_CALL, runs)


def first_touch(name: str, most: float | None, runs: int) -> Figure:
    """A name of the package in a fresh process that has torch."""
    program = f"import time, torch; t = time.process_time(); import exporter; exporter.{name}; print(time.process_time() - t)"
    times = [float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout) for _ in range(runs)]
    return Figure(f"first touch of exporter.{name}, above import torch", statistics.median(times), "s", most, runs)


def main() -> int:
    """Run; the exit status is 1 where a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = [*small_calls(options.rounds), first_call(options.runs)]
    figures += [first_touch(name, most, options.runs) for name, most in TOUCHED.items()]
    return tell("loaded", figures)


if __name__ == "__main__":
    sys.exit(main())
