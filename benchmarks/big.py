"""A large file as a module: the time of load and of the first steps, and the memory that it takes, beside eager's.

    python -m benchmarks.big                       # 0.7 G parameters, 2.8 GB
    python -m benchmarks.big --parameters 0.1      # fewer: limits of time shrink with them
    python -m benchmarks.big --cold                # as the machine's memory is

The model is a chain of blocks Linear(2048, 8192), a Function (GELU), Linear(8192, 2048), on a batch of 4: hardly anything but its weights costs
something. Its file is made in a temporary folder, and is in the system's cache when it is read. Each contender loads and makes two steps
(forward, loss.backward()) in a process of its own; another one reads every 10 ms how much memory that has, anonymous and of mapped files
apart: pages of a file can be dropped, and are no memory that somebody needs. Imports are in the memory, and not in the times.

A virtual machine gives memory that nobody uses back to its host within seconds, and gets it from there several times as slowly as from its own
system, whoever asks. So each contender first writes to as much memory as it will need and frees it; that time is told, and is in none of the
others. --cold leaves it out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks._models import Gelu
from benchmarks._process import status
from benchmarks._report import Figure, tell
from benchmarks.training_step import THREADS

__all__ = ["main"]

WIDTH, INNER, BATCH = 2048, 8192, 4
#: With 0.7 G parameters: seconds of load and of the first step.
LOAD_LIMIT, STEP_LIMIT = 3.0, 5.0
#: The most that may be resident over the bytes of parameters and gradients.
MEMORY_LIMIT = 1.15
#: Contenders, and what they are.
KINDS = {
    "file": "exporter.load",
    "eager": "eager, torch.load",
    "eager mapped": "eager, torch.load(mmap=True)",
}


class _Gelu(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Gelu.apply(x)


def _blocks(giga: float) -> int:
    return max(1, round(giga * 1e9 / (2 * WIDTH * INNER)))


def _size(giga: float) -> int:
    """Bytes of parameters and gradients."""
    return 2 * 4 * _blocks(giga) * 2 * WIDTH * INNER


def _model(giga: float) -> torch.nn.Module:
    """The chain with about so many 10^9 parameters."""
    return torch.nn.Sequential(
        *(
            layer
            for _ in range(_blocks(giga))
            for layer in (torch.nn.Linear(WIDTH, INNER, bias=False), _Gelu(), torch.nn.Linear(INNER, WIDTH, bias=False))
        )
    )


def _batch() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))


def _make(giga: float, folder: Path) -> None:
    """Write the model as ONNX and as a state_dict."""
    import exporter

    torch.manual_seed(0)
    model = _model(giga).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exporter.export(model, (_batch(),), dynamo=False, eager_check=False).save(folder / "model.onnx", external_data=True)
    torch.save(model.state_dict(), folder / "model.pt")
    for file in folder.iterdir():  # what is still on its way to the disk would be in the way of those who measure
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())


def _open(kind: str, giga: float, folder: Path) -> Callable[[], torch.nn.Module]:
    if kind == "file":
        import exporter

        load = exporter.load  # its imports
        return lambda: load(folder / "model.onnx", allow=["benchmarks._models:*"])
    with torch.device("meta"):
        model = _model(giga)

    def opened() -> torch.nn.Module:
        model.load_state_dict(torch.load(folder / "model.pt", mmap=kind == "eager mapped"), assign=True)
        return model

    return opened


def _touch(count: int) -> float:
    """Seconds to write to new memory of so many bytes."""
    import numpy as np

    begin = time.monotonic()
    np.empty(count, np.uint8).fill(1)
    return time.monotonic() - begin


def _measure(kind: str, giga: float, folder: Path, cold: bool) -> dict[str, Any]:
    """What one contender does, and when: the ends of each part by the clock that all processes share."""
    torch.set_num_threads(THREADS)
    load = _open(kind, giga, folder)
    batch = _batch()
    touched = None if cold else _touch(_size(giga))
    if not cold:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    marks = {"start": time.monotonic()}
    module = load().train()
    marks["load"] = time.monotonic()
    losses = []
    for name in ("first", "second"):
        module.zero_grad()
        loss = module(batch).square().mean()
        marks[f"{name} forward"] = time.monotonic()
        loss.backward()
        marks[f"{name} backward"] = time.monotonic()
        losses.append(loss.item())
    peak = status("VmHWM")
    norms = [parameter.grad.norm().item() for parameter in module.parameters() if parameter.grad is not None]
    told = {"marks": marks, "peak": peak, "touched": touched}
    return {**told, "losses": losses, "gradients": statistics.fmean(norms), "count": len(norms)}


def _run(*arguments: str) -> tuple[Any, list[tuple[float, float, float]]]:
    """What a process of its own tells, and its memory while it ran: (when, anonymous, of files), in MiB."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.big", *arguments]
    samples = []
    with tempfile.TemporaryFile("w+") as out, subprocess.Popen(command, stdout=out, env=environment) as process:
        while process.poll() is None:
            try:
                lines = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
                samples.append((time.monotonic(), *(int(lines[key].split()[0]) / 1024 for key in ("RssAnon", "RssFile"))))
            except (OSError, KeyError):  # it has ended
                pass
            time.sleep(0.01)
        out.seek(0)
        told = out.read().splitlines()
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {process.returncode}")
    return json.loads(told[-1]), samples


def _figures(kind: str, runs: list[Any], giga: float) -> list[Figure]:
    """Medians of what one contender's processes told; the memory is the largest."""
    title, ours = KINDS[kind], kind == "file"
    spans = {
        "load": ("start", "load", LOAD_LIMIT),
        "first step": ("load", "first backward", STEP_LIMIT),
        "first call": ("load", "first forward", None),
        "first backward": ("first forward", "first backward", None),
        "second step": ("first backward", "second backward", None),
    }
    figures = []
    for what, (begin, end, limit) in spans.items():
        seconds = [told["marks"][end] - told["marks"][begin] for told, _ in runs]
        note = ", ".join(f"{value:.2f}" for value in seconds) if len(seconds) > 1 else ""
        most = round(limit * giga / 0.7, 3) if ours and limit is not None else None
        figures.append(Figure(f"{title}: {what}", statistics.median(seconds), "s", most, len(runs), note))
    size = _size(giga) / 2**20
    whole = max(told["peak"] for told, _ in runs)
    note = f"{whole:.0f} MiB of {size:.0f} MiB"
    limit = MEMORY_LIMIT if ours else None
    figures.append(Figure(f"{title}: most memory / parameters and gradients", whole / size, "ratio", limit, len(runs), note))
    for what, end in (("load", "load"), ("two steps", "second backward")):
        during = [
            sample
            for told, samples in runs
            for sample in samples
            if told["marks"]["start"] <= sample[0] <= told["marks"][end]  # each process has its own
        ]
        anonymous, files = (max((sample[place] for sample in during), default=0.0) for place in (1, 2))
        figures.append(Figure(f"{title}: most anonymous memory until after {what}", anonymous, "MiB", None, len(runs)))
        figures.append(Figure(f"{title}: most of mapped files until after {what}", files, "MiB", None, len(runs)))
    return figures


def main(argv: list[str] | None = None) -> int:
    """Run; the exit status is 1 where a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=0.7, metavar="G", help="10^9 parameters; default 0.7")
    parser.add_argument("--runs", type=int, default=3, help="processes of each contender, in turns; default 3")
    parser.add_argument("--cold", action="store_true", help="take the memory as the machine gives it")
    parser.add_argument("--only", choices=KINDS, action="append", help="one contender; may be given again")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.make:
        print(json.dumps(_make(options.parameters, options.make)))
        return 0
    if options.measure:
        kind, folder = options.measure
        print(json.dumps(_measure(kind, options.parameters, Path(folder), options.cold)))
        return 0
    giga = str(options.parameters)
    kinds = options.only or list(KINDS)
    found: dict[str, list[Any]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        _run("--parameters", giga, "--make", folder)
        for _ in range(options.runs):
            for kind in kinds:
                found[kind].append(_run("--parameters", giga, "--measure", kind, folder, *(["--cold"] if options.cold else [])))
    told = [result for runs in found.values() for result, _ in runs]
    for key in ("losses", "gradients", "count"):
        values = torch.tensor([result[key] for result in told], dtype=torch.float64)
        if not torch.allclose(values, values[:1].expand_as(values), rtol=1e-3):
            raise RuntimeError(f"the contenders differ in their {key}: {values.tolist()}")
    figures = [figure for kind in kinds for figure in _figures(kind, found[kind], options.parameters)]
    touched = [] if options.cold else [result["touched"] for result in told]
    if touched:
        note = f"{min(touched):.2f} to {max(touched):.2f}, before each contender"
        figures.append(Figure("new memory of parameters and gradients", statistics.median(touched), "s", None, len(touched), note))
    return tell("big", figures)


if __name__ == "__main__":
    sys.exit(main())
