"""How far 200 steps of a loaded file are from eager's, beside how far eager is from itself. Prints JSON.

    python -m benchmarks.training_curves [--only bloom|snn]

Training is chaotic: one rounding grows with the steps. So eager is trained again, five times with every parameter and float
input moved by one ulp up or down at random, and five times with other thread counts (2, 3, 4, 6, 8 for 1). The envelope
of a step is the largest distance of the loss from the first run's that any of five runs has had up to that step: what has
been seen before a step may be seen at it. The file must be within twice the wider of the two at every step, plus eight
roundings of the loss itself (a loss is a sum, and its order is free). In float64 it must be within 1e-6.

The rate must halve the loss, and the gradients of the first step must be within 1e-5 of eager's: of each tensor's largest
element, at least a hundredth of the model's (the gradient of a key's bias is 0 but for rounding).
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks._report import Figure, tell
from examples import demo
from examples.train import STEPS, TASKS, Task, Training, both, train

RUNS = 5
THREADS = (2, 3, 4, 6, 8)
FACTOR = 2.0
ROUNDINGS = 8 * torch.finfo(torch.float32).eps
FIRST_GRADIENTS = 1e-5
FLOAT64 = 1e-6


def nudged(task: Task, seed: int) -> Task:
    """The task with every float parameter and input moved to one of its neighbours."""
    generator = torch.Generator().manual_seed(seed)

    def move(value: torch.Tensor) -> torch.Tensor:
        up = torch.rand(value.shape, generator=generator) < 0.5
        return torch.nextafter(value, torch.where(up, torch.inf, -torch.inf).to(value.dtype))

    model = copy.deepcopy(task.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(move(parameter))
    return replace(task, model=model, args=tuple(move(x) if x.is_floating_point() else x for x in task.args))


def by_ulps(task: Task, steps: int = STEPS) -> list[list[float]]:
    """Eager's losses from five neighbouring starts."""
    tasks = [nudged(task, seed) for seed in range(RUNS)]
    return [train(one.model, one, steps).losses for one in tasks]


def by_threads(task: Task, steps: int = STEPS) -> list[list[float]]:
    """Eager's losses with five other thread counts."""
    before = torch.get_num_threads()
    runs = []
    try:
        for threads in THREADS:
            torch.set_num_threads(threads)
            runs.append(train(copy.deepcopy(task.model), task, steps).losses)
    finally:
        torch.set_num_threads(before)
    return runs


def distances(losses: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Step by step."""
    return [abs(a - b) for a, b in zip(losses, expected, strict=True)]


def envelope(runs: Iterable[Sequence[float]], expected: Sequence[float]) -> list[float]:
    """The largest distance of any run up to each step."""
    widest, found = 0.0, []
    for at_step in zip(*(distances(run, expected) for run in runs), strict=True):
        widest = max(widest, *at_step)
        found.append(widest)
    return found


def first_gradients(found: Training, expected: Training) -> float:
    """The largest relative difference of the gradients of the first step; infinite where one is missing."""
    if found.first.keys() != expected.first.keys():
        return float("inf")
    largest = max(float(g.abs().max()) for g in expected.first.values())
    scales = {name: max(float(g.abs().max()), 0.01 * largest) for name, g in expected.first.items()}
    return max(float((found.first[name] - g).abs().max()) / scales[name] for name, g in expected.first.items())


def beyond(file: Sequence[float], expected: Sequence[float], *envelopes: Sequence[float]) -> list[int]:
    """The steps at which the file is farther away than it may be."""
    allowed = [FACTOR * max(at_step) for at_step in zip(*envelopes, strict=True)]
    gaps = distances(file, expected)
    return [step for step, (gap, most, loss) in enumerate(zip(gaps, allowed, expected, strict=True)) if gap > most + ROUNDINGS * abs(loss)]


def in_float64(task: Task) -> Task:
    """The same in double precision; the loss's own targets stay as they are."""
    args = tuple(x.double() if x.is_floating_point() else x for x in task.args)
    return replace(task, model=copy.deepcopy(task.model).double(), args=args)


def measure(key: str, folder: Path) -> dict[str, Any]:
    """Everything about one network."""
    task = TASKS[key][1]()
    eager, file, _ = both(task, folder / f"{key}.onnx")
    ulps, threads = by_ulps(task), by_threads(task)
    envelopes = [envelope(runs, eager.losses) for runs in (ulps, threads)]
    double, double_file, _ = both(in_float64(task), folder / f"{key}-float64.onnx")
    result: dict[str, Any] = {
        "steps": STEPS,
        "rate": task.rate,
        "loss": [eager.losses[0], eager.losses[-1]],
        "first_gradients": first_gradients(file, eager),
        "distance": max(distances(file.losses, eager.losses)),
        "envelope_one_ulp": envelopes[0][-1],
        "envelope_threads": envelopes[1][-1],
        "runs_one_ulp": [max(distances(run, eager.losses)) for run in ulps],
        "runs_threads": [max(distances(run, eager.losses)) for run in threads],
        "steps_outside": beyond(file.losses, eager.losses, *envelopes),
        "distance_float64": max(distances(double_file.losses, double.losses)),
    }
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=TASKS, action="append")
    options = parser.parse_args(argv)
    demo.quiet()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {key: measure(key, Path(folder)) for key in options.only or TASKS}
    return tell("training_curves", [figure for key, result in found.items() for figure in _figures(key, result)])


def _figures(key: str, result: dict[str, Any]) -> list[Figure]:
    def each(runs: list[float]) -> str:
        return "each run: " + ", ".join(f"{run:.2g}" for run in runs)

    first, last = result["loss"]
    return [
        Figure(f"{key}: last loss / first loss", last / first, "ratio", 0.5, 1, f"{STEPS} steps"),
        Figure(f"{key}: gradients of the first step, relative", result["first_gradients"], "", FIRST_GRADIENTS),
        Figure(f"{key}: the file's distance from eager", result["distance"], ""),
        Figure(f"{key}: eager's envelope, one ulp", result["envelope_one_ulp"], "", None, RUNS, each(result["runs_one_ulp"])),
        Figure(f"{key}: eager's envelope, threads", result["envelope_threads"], "", None, RUNS, each(result["runs_threads"])),
        Figure(f"{key}: steps outside twice the envelope", len(result["steps_outside"]), "", 0),
        Figure(f"{key}: the file's distance in float64", result["distance_float64"], "", FLOAT64),
    ]


if __name__ == "__main__":
    sys.exit(main())
