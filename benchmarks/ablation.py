"""What each pass of the accelerator for onnxruntime's CPU brings: a training step without it, beside the step with all of them.

    python -m benchmarks.ablation                  # every model
    python -m benchmarks.ablation cnn lstm         # some

Per model, in one process of its own: eager PyTorch, our step with all passes, with none (``accelerate=False``), and without each pass that
replaces something in it; they take turns as in benchmarks.training_step. Figures are medians, over the step with all passes: 1.2 without
a pass means that it saves a sixth. A pass that brings less than 5 % on every model, on two kinds of processors, has no place here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from benchmarks._report import Figure, tell
from benchmarks.training_step import THREADS, child, eager, exported, runs, turns

MODELS = ("gpt-b2", "gpt-b1-1024", "cnn", "resnet18", "vgg", "convnext", "lstm", "gru")


@contextmanager
def accelerator_of(passes: Sequence[Any], claims: Mapping[str, Any]) -> Iterator[None]:
    """Sessions have an accelerator of these passes and claims."""
    from exporter.cpu import accelerator

    before = accelerator.ACCELERATOR
    accelerator.ACCELERATOR = accelerator.CpuAccelerator(passes, claims)
    try:
        yield
    finally:
        accelerator.ACCELERATOR = before


def accelerator_without(name: str) -> AbstractContextManager[None]:
    """The accelerator without a pass, or without what it does with a gradient of this name."""
    from exporter.cpu.accelerator import CLAIMS, PASSES

    return accelerator_of([each for each in PASSES if each.name != name], {each: made for each, made in CLAIMS.items() if each != name})


def used(step: Any, sample: Any) -> list[str]:
    """The names of the passes that replace something when a step is opened, and of the gradients in it that the accelerator computes."""
    from exporter.cpu.accelerator import CLAIMS, PASSES

    found: dict[str, None] = {}

    def noted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            made = run(*args)
            if made:  # nodes that were replaced, or values that stand for a call
                found[name] = None
            return made

        return noting

    passes = [each._replace(run=noted(each.name, each.run)) for each in PASSES]
    with accelerator_of(passes, {name: noted(name, made) for name, made in CLAIMS.items()}):
        runs(step, sample)()
    return list(found)


def measure(name: str, steps: int) -> dict[str, Any]:
    """Seconds of a step of each."""
    import torch

    from benchmarks._models import MODELS as made

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    sample = made[name]()
    step = exported(sample)
    contenders: dict[str, Callable[[], float]] = {"all": runs(step, sample)}
    for left_out in used(step, sample):
        with accelerator_without(left_out):
            contenders[f"without {left_out}"] = runs(step, sample)
    contenders["none"] = runs(step, sample, accelerate=False)
    contenders["eager"] = eager(sample)
    seconds, losses = turns(contenders, steps)
    if any(abs(loss - losses["eager"]) > 2e-2 * max(1, abs(losses["eager"])) for loss in losses.values()):
        raise RuntimeError(f"{name}: the losses differ: {losses}")
    return seconds


def main(argv: list[str] | None = None) -> int:
    """Run; the exit status is 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps(measure(args.models[0], args.steps)))
        return 0
    figures = []
    for name in args.models or MODELS:
        seconds = child(name, "--child", "--steps", str(args.steps), program="ablation")
        whole = seconds.pop("all")
        figures.append(Figure(f"{name}: all, over eager", whole / seconds["eager"], "ratio", runs=args.steps, note=f"{whole * 1e3:.1f} ms"))
        figures += [Figure(f"{name}: {kind}, over all", value / whole, "ratio", runs=args.steps) for kind, value in seconds.items()]
    return tell("ablation", figures)


if __name__ == "__main__":
    sys.exit(main())
