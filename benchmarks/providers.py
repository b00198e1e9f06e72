"""A training step (forward, loss, backward, AdamW) as one file on several execution providers, beside eager PyTorch and torch.compile.

    python -m benchmarks.providers                                                  # the CPU alone
    python -m benchmarks.providers --provider openvino --provider openvino,precision=bfloat16
    python -m benchmarks.providers gpt-b2 resnet --provider openvino

Per model, in one process of its own, all take turns as in benchmarks/training_step.py. Figures are medians of the steps after those of warming up,
as ratios to eager in float32. A provider that cannot open a step is named with its reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks._report import Figure, tell
from benchmarks.training_step import THREADS, child, eager, exported, runs, turns

MODELS = ("gpt-b2", "gpt-b8", "bloom", "convnext", "resnet", "lstm")


def _contenders(name: str, providers: Sequence[str], compiled: bool) -> tuple[dict[str, Callable[[], float]], dict[str, str]]:
    import torch

    from benchmarks._models import MODELS as KNOWN
    from exporter.commands.providers import provider_of

    made: dict[str, Callable[[Any], Callable[[], float]]] = {"eager": eager, "eager, autocast": lambda sample: eager(sample, bfloat16=True)}
    if compiled:
        made["torch.compile"] = lambda sample: eager(sample, True)
        made["torch.compile, autocast"] = lambda sample: eager(sample, True, True)
    made["ours"] = lambda sample: runs(exported(sample), sample)
    made["ours, accelerate=False"] = lambda sample: runs(exported(sample), sample, accelerate=False)
    for text in providers:
        made[f"ours, {text}"] = lambda sample, text=text: runs(exported(sample), sample, providers=[provider_of(text)])  # type: ignore[misc]
    found, refused = {}, {}
    for kind, make in made.items():
        torch.manual_seed(0)
        try:
            run = make(KNOWN[name]())
            run()
            found[kind] = run
        except Exception as error:
            if kind in ("eager", "ours"):
                raise
            refused[kind] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return found, refused


def _measure(name: str, providers: Sequence[str], steps: int, compiled: bool) -> dict[str, Any]:
    import torch

    torch.set_num_threads(THREADS)
    found, refused = _contenders(name, providers, compiled)
    seconds, losses = turns(found, steps)
    return {"seconds": seconds, "losses": losses, "refused": refused}


def main(argv: list[str] | None = None) -> int:
    """Run; the exit status is 0, for no limit is set: the hardware decides."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {', '.join(MODELS)}")
    parser.add_argument("--provider", action="append", default=[], metavar="NAME[,OPTION=VALUE]")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out: its first step takes half a minute")
    parser.add_argument("--time", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.time:
        print(json.dumps(_measure(options.time, options.provider, options.steps, not options.no_compile)))
        return 0
    given = [part for text in options.provider for part in ("--provider", text)] + (["--no-compile"] if options.no_compile else [])
    figures = []
    for name in options.models or MODELS:
        found = child("--time", name, "--steps", str(options.steps), *given, program="providers")
        seconds, losses = found["seconds"], found["losses"]
        for kind, value in seconds.items():
            note = f"{1e3 * value:.1f} ms, loss {losses[kind]:.4f}"
            figures.append(Figure(f"{name}: {kind} / eager", value / seconds["eager"], "ratio", None, options.steps, note))
        for kind, reason in found["refused"].items():
            figures.append(Figure(f"{name}: {kind}", None, "", None, 0, f"cannot: {reason}"))
    return tell("providers", figures)


if __name__ == "__main__":
    sys.exit(main())
