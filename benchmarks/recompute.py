"""What recompute= saves of the memory of a training step, and what it costs of its time.

    python -m benchmarks.recompute                # GPT and ResNet
    python -m benchmarks.recompute resnet

Per model the step as it is, with recompute="auto", and with recompute=0 (the least that can be kept). Times are taken in turns in one
process, medians of ``--steps``; peak memory in processes that run one of them alone. Ratios are to the step as it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings

from benchmarks._report import Figure, tell
from benchmarks.training_step import THREADS, child, ours, peak

CHOICES = {"all kept": None, "auto": "auto", "least": 0}
#: model -> the most that "auto" may take, of memory and of time. The ResNet's peak is its kernels' own memory.
LIMITS: dict[str, tuple[float | None, float | None]] = {"gpt-b8": (0.9, 1.15), "resnet": (None, 1.2)}


def _run(name: str, choice: str):
    import torch

    from benchmarks._models import MODELS

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    return ours(MODELS[name](), recompute=CHOICES[choice])


def _times(name: str, steps: int) -> dict[str, float]:
    """Seconds of a step."""
    runs = {choice: _run(name, choice) for choice in CHOICES}
    times: dict[str, list[float]] = {choice: [] for choice in runs}
    for number in range(steps + 3):
        for choice, run in runs.items():
            begin = time.perf_counter()
            run()
            if number >= 3:
                times[choice].append(time.perf_counter() - begin)
    return {choice: statistics.median(values) for choice, values in times.items()}


def main(argv: list[str] | None = None) -> int:
    """Run; the exit status is 1 where a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(LIMITS)}")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--time", help=argparse.SUPPRESS)
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.time:
        print(json.dumps(_times(options.time, options.steps)))
        return 0
    if options.memory:
        print(json.dumps(peak(_run(*options.memory))))
        return 0
    figures = []
    for name in options.models or LIMITS:
        seconds = child("--time", name, "--steps", str(options.steps), program="recompute")
        memory = {choice: child("--memory", name, choice, program="recompute") for choice in CHOICES}
        for choice in ("auto", "least"):
            most = LIMITS.get(name, (None, None)) if choice == "auto" else (None, None)
            for what, found, limit, unit, scale in (("memory", memory, most[0], "MiB", 1), ("time", seconds, most[1], "ms", 1e3)):
                note = f"{scale * found[choice]:.0f} {unit}; all kept {scale * found['all kept']:.0f} {unit}"
                ratio = found[choice] / found["all kept"]
                figures.append(Figure(f"{name}: {what} of a step, {choice} / all kept", ratio, "ratio", limit, options.steps, note))
    return tell("recompute", figures)


if __name__ == "__main__":
    sys.exit(main())
