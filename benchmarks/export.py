"""How long an export takes with the hook, against bare torch.onnx.export (which inlines the Functions).

Both run in one process, in turns, after a warm-up; the medians of their processor time, on one thread, stand side by side. Targets: with the hook at most 1.1 times
bare torch, at most 0.8 times for 12 blocks of a transformer by torch.export, 0.7 times at 100 calls, and a time per call that does not grow from 100 to 1000 calls (or grows less than bare torch's own does).
The same calls as ONNX functions (portable=True) stand beside those as PythonOps: at most 1.5 times their export, where equal calls share one; once more in
processes that export once and end, as people's do, imports included.
Opening a hook (with the call of a Function that shows that calls are caught) and the eager run that judges the file stand beside it, as shares of the
transformer's export.

    python -m benchmarks.export [--runs 5] [--json] [--only CASE ...]
"""

from __future__ import annotations

import argparse
import io
import logging
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import exporter
from benchmarks._models import MODELS
from benchmarks._report import Figure, tell

RATIO, RATIO_AT_100, GROWTH, PORTABLE = 1.1, 0.7, 1.25, 1.5
SHORT = 0.1  # seconds
EXPORTERS = {True: "torch.export", False: "TorchScript"}  # by dynamo=


class Gelu(torch.autograd.Function):
    """The tanh approximation of GELU as BLOOM and Megatron write it: what a custom activation usually looks like."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        tanh = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        return gradient * (0.5 * x * ((1 - tanh * tanh) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + tanh))


class Chain(nn.Module):
    """A Linear and a Function, again and again."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(calls))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Gelu.apply(layer(x))
        return x


class Block(nn.Module):
    """A pre-norm transformer block with the Function in its feed-forward half."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(self.first(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5, -1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(Gelu.apply(self.up(self.second(x))))


def transformer(blocks: int) -> nn.Module:
    return nn.Sequential(*[Block(32, 4) for _ in range(blocks)])


Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


@dataclass
class Case:
    name: str
    make: Callable[[], Made]
    limits: dict[bool, float]  # by dynamo=
    share: float = 1.0  # of --runs: long cases run less often
    sides: tuple[str, str] = ("bare", "hook")
    dynamic: bool = True  # the batch


def chain(calls: int) -> Made:
    return Chain(calls), (torch.randn(2, 8),)


def sample(name: str) -> Made:
    found = MODELS[name]()
    return found.model, found.args


def portable(name: str, make: Callable[[], Made], share: float = 1.0, torchscript: float = PORTABLE, dynamic: bool = True) -> Case:
    return Case(f"{name}, portable", make, {True: PORTABLE, False: torchscript}, share, ("hook", "portable"), dynamic)


CASES = [
    Case("1 call", lambda: chain(1), {True: RATIO, False: RATIO}),
    Case("10 calls", lambda: chain(10), {True: RATIO, False: RATIO}),
    Case("100 calls", lambda: chain(100), {True: RATIO_AT_100, False: RATIO_AT_100}, 0.6),
    Case("8-block transformer", lambda: (transformer(8), (torch.randn(2, 6, 32),)), {True: RATIO, False: RATIO}, 0.6),
    Case("12-block transformer", lambda: (transformer(12), (torch.randn(2, 6, 32),)), {True: 0.8, False: RATIO}, 0.6),
    # A trace and a translation of GELU and its backward take 150 ms, TorchScript's whole export of one call takes 12.
    portable("1 call", lambda: chain(1), torchscript=20),
    portable("10 calls", lambda: chain(10), torchscript=6.5),
    portable("100 calls", lambda: chain(100), 0.6),
    portable("BLOOM", lambda: sample("bloom"), 0.6, dynamic=False),
    portable("snntorch", lambda: sample("snntorch"), 0.6, dynamic=False),
]


def export_once(model: nn.Module, args: tuple[torch.Tensor, ...], dynamo: bool, side: str, dynamic: bool = True) -> float:
    """Seconds of one export, "bare", with the "hook", or "portable": processor time, which other users of the machine disturb less."""
    start = time.process_time()

    def run() -> None:
        if dynamo:
            shapes = ({0: torch.export.Dim.DYNAMIC},) if dynamic else None
            torch.onnx.export(model, args, dynamo=True, dynamic_shapes=shapes, verbose=False)
        else:
            axes = {"x": {0: "batch"}} if dynamic else None
            torch.onnx.export(model, args, io.BytesIO(), dynamo=False, input_names=["x"], dynamic_axes=axes)

    if side == "bare":
        run()
    else:
        with exporter.hook(portable=side == "portable"):
            run()
    return time.process_time() - start


def compare(case: Case, dynamo: bool, runs: int) -> Figure:
    """Medians of two sides that take turns, so that a slow minute of the machine meets both."""
    model, args = case.make()
    first, second = case.sides
    times: dict[str, list[float]] = {first: [], second: []}
    count = max(3, round(runs * case.share))
    if export_once(model, args, dynamo, first, case.dynamic) < SHORT:  # a millisecond more or less is a tenth of it
        count *= 10
    for turn in range(count + 1):
        for side in (first, second) if turn % 2 else (second, first):
            seconds = export_once(model, args, dynamo, side, case.dynamic)
            if turn:  # the first is the warm-up
                times[side].append(seconds)
    one, other = statistics.median(times[first]), statistics.median(times[second])
    return Figure(
        f"{case.name}, {EXPORTERS[dynamo]}: {second} / {first}", other / one, "ratio", case.limits[dynamo], count,
        f"{first} {one:.3f} s, {second} {other:.3f} s, {min(times[second]) / one:.2f} to {max(times[second]) / one:.2f}",
    )  # fmt: skip


def alone(case: Case, dynamo: bool, runs: int) -> Figure:
    """Two sides in processes of their own that import, make the model and export it once: processor time of the whole process."""
    times: dict[str, list[float]] = {side: [] for side in case.sides}
    for _ in range(max(3, round(runs * case.share))):
        for side in case.sides:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-m", "benchmarks.export", "--once", case.name, EXPORTERS[dynamo], side], check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times[side].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    one, other = (statistics.median(times[side]) for side in case.sides)
    note = f"{case.sides[0]} {one:.2f} s, {case.sides[1]} {other:.2f} s, of which importing is most"
    return Figure(f"{case.name}, {EXPORTERS[dynamo]}, whole process", other / one, "ratio", PORTABLE, len(times[case.sides[0]]), note)


@dataclass
class Growth:
    """Seconds a call, with the hook, at 100 and at 1000 calls; ``bare`` is the same ratio of bare torch where it was needed."""

    exporter: str
    at_100: float
    at_1000: float
    ratio: float
    bare: float | None
    ok: bool


def growth(dynamo: bool) -> Growth:
    def seconds(calls: int, side: str, runs: int = 1) -> float:
        return statistics.median(export_once(*chain(calls), dynamo, side) for _ in range(runs)) / calls

    small, large = seconds(100, "hook", 3), seconds(1000, "hook")
    # Some of torch's own passes over a TorchScript graph take longer a node in a longer graph: they do so without us, too.
    bare = seconds(1000, "bare") / seconds(100, "bare", 3) if large / small > GROWTH else None
    return Growth(EXPORTERS[dynamo], small, large, large / small, bare, large / small <= (bare or GROWTH))


def shares(dynamo: bool, runs: int) -> list[Figure]:
    """What opening a hook and the eager run take of an export of the transformer."""
    from exporter.forward.eager_graph import EagerGraph

    (case,) = [case for case in CASES if case.name == "8-block transformer"]
    model, args = case.make()

    def opened() -> float:
        start = time.process_time()
        for _ in range(100):
            with exporter.hook():
                pass
        return (time.process_time() - start) / 100

    def judged() -> float:
        with exporter.hook():
            start = time.process_time()
            EagerGraph.of(model, args, {})
            return time.process_time() - start

    turns = [(export_once(model, args, dynamo, "hook"), opened(), judged()) for _ in range(runs + 1)][1:]
    whole, opening, judging = (statistics.median(column) for column in zip(*turns, strict=True))
    return [
        Figure(
            f"opening a hook, {case.name}, {EXPORTERS[dynamo]}", opening / whole, "of the export", 0.01, runs, f"{1e6 * opening:.0f} us"
        ),
        Figure(
            f"eager run, {case.name}, {EXPORTERS[dynamo]}",
            judging / whole,
            "of the export",
            0.1,
            runs,
            f"{1e3 * judging:.1f} of {1e3 * whole:.0f} ms",
        ),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Export time with the hook against bare torch.onnx.export.")
    parser.add_argument("--runs", type=int, default=5, help="runs of each side (default 5; long cases run three times)")
    parser.add_argument(
        "--only",
        nargs="*",
        help="cases by name; 'growth' is the run to 1000 calls, 'shares' what the hook's own parts take, 'processes' portable exports in processes of their own",
    )
    parser.add_argument("--once", nargs=3, metavar=("CASE", "EXPORTER", "SIDE"), help="export once, and tell nothing")
    parser.add_argument("--exporter", choices=["torch.export", "TorchScript"], help="one of the two")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)

    if options.once:
        (case,) = [case for case in CASES if case.name == options.once[0]]
        export_once(*case.make(), options.once[1] == EXPORTERS[True], options.once[2], case.dynamic)
        return 0

    wanted = [case for case in CASES if not options.only or case.name in options.only]
    paths = [dynamo for dynamo in (True, False) if options.exporter in (None, EXPORTERS[dynamo])]
    grow = not options.only or "growth" in options.only
    figures: list[Figure] = []
    grown: list[Growth] = []
    parts: list[Figure] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(paths) * (len(wanted) + grow))
        for dynamo in paths:
            for case in wanted:
                progress.update(task, description=f"{case.name}, {EXPORTERS[dynamo]}")
                figures.append(compare(case, dynamo, options.runs))
                progress.advance(task)
            if grow:
                progress.update(task, description="1000 calls")
                grown.append(growth(dynamo))
                progress.advance(task)
            if not options.only or "shares" in options.only:
                parts += shares(dynamo, options.runs)
            if not options.only or "processes" in options.only:
                parts += [alone(case, dynamo, options.runs) for case in CASES if case.sides[1] == "portable"]
    for g in grown:
        note = f"{1e3 * g.at_100:.1f} and {1e3 * g.at_1000:.1f} ms a call" + (f"; bare torch's own {g.bare:.2f}" if g.bare else "")
        figures.append(Figure(f"growth of a call from 100 to 1000, {g.exporter}", g.ratio, "ratio", max(GROWTH, g.bare or 0), 1, note))
    return tell("export", [*figures, *parts])


if __name__ == "__main__":
    sys.exit(main())
