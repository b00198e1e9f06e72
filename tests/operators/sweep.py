"""``python -m tests.operators.sweep``: every operator on both exporters, each in a process that may die.

The parent imports torch and the product once and forks a child for each operator and exporter; the child says the kind of inputs that it
is about to try, and then what became of it. A child that dies or spends more than half a minute on one kind loses that kind alone: the
next child goes on behind it. The record has a line of JSON for each operator and exporter, and a sweep that was stopped goes on where it was.

``--opaque``: what the record says that torch.onnx fails at, again with opaque="missing", into a record of its own.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import os
import resource
import select
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime
import torch

import exporter
from tests import torchlib
from tests.operators import named, outcome, samples
from tests.processes import ROOT

__all__ = ["EXPORTERS", "OPAQUE", "RECORD", "Line", "lines", "names", "sweep", "untranslated", "write"]

RECORD = Path(__file__).with_name("data") / "record.jsonl"
#: What became of the calls that torch.onnx fails at, with opaque="missing".
OPAQUE = RECORD.with_name("opaque.jsonl")
EXPORTERS = {"dynamo": True, "torchscript": False}
_CPU = 30  # seconds of one kind
_WALL = 240  # seconds of one kind, on a machine that others use, too
_Lines = Mapping[tuple[str, str], "Line"]


@dataclass
class Line:
    """What became of an operator on an exporter.

    Attributes:
        operator, exporter: Which.
        samples: How many samples of the database were asked for; -1: only the inputs of `named`.
        torch: The release.
        onnxruntime: The release; lines that do not say it are from the time when 1.31.1 was pinned.
        kinds: Kind of inputs -> (word, stage, why, whether there is a gradient). On disk what works is 1 with a gradient, 0 without, but where
            it has a why: the opaque nodes.
    """

    operator: str
    exporter: str
    samples: int
    torch: str
    kinds: dict[str, list[Any]] = field(default_factory=dict)
    onnxruntime: str = "1.31.1"


def lines(record: Path = RECORD) -> dict[tuple[str, str], Line]:
    """(operator, exporter) -> its line."""
    if not record.exists():
        return {}
    found = {}
    for text in record.read_text().splitlines():
        line = Line(**json.loads(text))
        line.kinds = {kind: ["works", "backward", "", bool(said)] if isinstance(said, int) else said for kind, said in line.kinds.items()}
        found[line.operator, line.exporter] = line
    return found


def write(line: Line, record: Path) -> None:
    """Add a line to the record."""
    kinds = {kind: int(said[3]) if said[0] == "works" and not said[2] else said for kind, said in line.kinds.items()}
    with record.open("a") as file:
        file.write(json.dumps({**asdict(line), "kinds": kinds}, separators=(",", ":")) + "\n")


def _tidy(record: Path) -> None:
    """One line for each operator and exporter, the last one, in the order of the alphabet."""
    found, new = lines(record), record.with_suffix(".new")
    new.write_text("")
    for _, line in sorted(found.items(), key=lambda item: (item[0][0].lower(), item[0])):
        write(line, new)
    new.replace(record)


def untranslated(found: Mapping[tuple[str, str], Line]) -> dict[tuple[str, str], Line]:
    """The lines of a record with inputs that torch.onnx fails at."""
    return {key: line for key, line in found.items() if _failing(line)}


def _failing(line: Line) -> list[str]:
    return [kind for kind, (word, *_) in line.kinds.items() if word == "torch.onnx fails"]


def sweep(names: list[str], count: int, record: Path, jobs: int = 2, again: bool = False, opaque: _Lines | None = None) -> None:
    """Run operators and write their lines; those that the record has from this torch and onnxruntime, with as many samples, are left out.

    Args:
        names: The operators.
        count: Samples of the database; 0 or less: only the inputs of `named`.
        record: The file of lines.
        jobs: How many processes at a time.
        again: Leave none out.
        opaque: Lines of another record: two kinds of each that torch.onnx fails at, where there are two, with opaque="missing", in place of everything.
    """
    releases = (torch.__version__.split("+")[0], onnxruntime.__version__)
    done = lines(record)
    wanted = [(name, which) for name in names for which in EXPORTERS if opaque is None or (name, which) in opaque]

    counts = {key: count if opaque is None else opaque[key].samples for key in wanted}

    def is_old(key: tuple[str, str]) -> bool:
        line = done[key]
        return line.samples < counts[key] or (line.torch, line.onnxruntime) != releases

    todo = iter([key for key in wanted if again or key not in done or is_old(key)])
    running: dict[int, _Child] = {}
    while True:
        while len(running) < jobs and (key := next(todo, None)) is not None:
            child = _Child(Line(*key, counts[key], releases[0], onnxruntime=releases[1]), None if opaque is None else _failing(opaque[key]))
            running[child.out] = child
        if not running:
            return _tidy(record)
        ready, _, _ = select.select(list(running), [], [], 5.0)
        for out, child in list(running.items()):
            if (out in ready and not child.read()) or child.late():
                del running[out]
                if child.again():
                    running[child.out] = child
                else:
                    write(child.line, record)
                    print(time.strftime("%H:%M:%S"), _short(child.line), flush=True)


def _short(line: Line) -> str:
    words: dict[str, int] = {}
    for word, *_ in line.kinds.values():
        words[word] = words.get(word, 0) + 1
    return f"{line.operator} {line.exporter}: {', '.join(f'{count} {word}' for word, count in words.items())}"


class _Child:
    """A process that runs one operator on one exporter, and the ones that follow it when it dies."""

    def __init__(self, line: Line, opaque: list[str] | None) -> None:
        self.line, self.opaque = line, opaque
        self.tried: list[str] = []
        self._start()

    def _start(self) -> None:
        self.out, write = os.pipe()
        self.since, self.text, self.current, self.before = time.monotonic(), b"", "", len(self.tried)
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.out)
                nowhere = os.open(os.devnull, os.O_RDWR)
                for number in (0, 1, 2):
                    os.dup2(nowhere, number)
                _child(self.line, self.opaque, self.tried, write)
            except BaseException as error:  # a fault of the sweep
                os.write(write, json.dumps(["the sweep itself", ["crash", "?", outcome.said(error), True]]).encode() + b"\n")
            finally:
                os._exit(0)  # nothing of the parent is ended here
        os.close(write)

    def read(self) -> bool:
        """Take up what the child says; False: it says nothing more."""
        data = os.read(self.out, 1 << 16)
        self.text += data
        *whole, self.text = self.text.split(b"\n")
        for text in whole:
            kind, found = json.loads(text)
            self.since = time.monotonic()
            self.current = kind if found == "file" else ""
            if isinstance(found, list):
                self.line.kinds[kind] = found
            elif found == "eager":
                self.tried.append(kind)
        return bool(data)

    def late(self) -> bool:
        """Whether the kind takes too long, whatever it does; the child is ended then."""
        if time.monotonic() - self.since < _WALL:
            return False
        os.kill(self.pid, signal.SIGKILL)
        return True

    def again(self) -> bool:
        """Whether the child died over a kind and another one goes on behind it."""
        os.close(self.out)
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if not code:
            return False
        if not self.current:  # eager died of it: there is nothing to compare with
            if len(self.tried) == self.before:
                return False
            self._start()
            return True
        hang = code in (-signal.SIGXCPU, -signal.SIGKILL)
        why = f"more than {_CPU} seconds" if hang else f"the process died of {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        self.line.kinds[self.current] = ["crash", "?", why, True]
        self._start()
        return True


def _child(line: Line, opaque: list[str] | None, tried: list[str], write: int) -> None:
    """Run the kinds that no child before tried."""
    torch.set_num_threads(1)
    for group in samples.groups(line.operator, line.samples):
        wanted = list(group.kinds) if opaque is None else _two(group, opaque)
        kept = {kind: tensors for kind, tensors in group.kinds.items() if kind in wanted and kind not in tried}
        if not kept:
            continue
        run = outcome.outcomes if opaque is None else outcome.opaque_outcomes
        for kind, found in run(line.operator, samples.Group(group.call, kept), EXPORTERS[line.exporter]):
            said = found if isinstance(found, str) else [found.word, found.stage, found.why, found.trains]
            os.write(write, json.dumps([kind, said]).encode() + b"\n")
            used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
            resource.setrlimit(resource.RLIMIT_CPU, (int(used) + _CPU, resource.RLIM_INFINITY))


def _two(group: samples.Group, kinds: list[str]) -> list[str]:
    """The first two of these kinds, where the group has them; where there is one alone, the group's last besides."""
    found = [kind for kind in group.kinds if kind in kinds[:2]]
    return [*found, list(group.kinds)[-1]] if found and len(kinds) == 1 else found


def _warm() -> None:
    """What every child would do again."""
    torchlib.built_once()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    for dynamo in EXPORTERS.values():
        exporter.export(torch.nn.Linear(2, 2), torch.zeros(1, 2), dynamo=dynamo)


def names(patterns: list[str], only_named: bool) -> list[str]:
    """The operators that match, those of `named` first."""
    everything = [*named.CASES, *([] if only_named else samples.operators())]
    left_out = samples.UNINITIALIZED | samples.IN_PLACE
    return [name for name in dict.fromkeys(everything) if name not in left_out and any(fnmatch.fnmatch(name, p) for p in patterns)]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", default=["*"], help="operators, as torch's tests name them")
    parser.add_argument("--samples", type=int, default=3, help="of the database, beside the extremes")
    parser.add_argument("--named", action="store_true", help="only the inputs of named.py")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="also what the record has")
    parser.add_argument("--anew", action="store_true", help="a new record, which takes the place of the old one when it is complete")
    parser.add_argument("--opaque", action="store_true", help='with opaque="missing", what the record says that torch.onnx fails at')
    asked = parser.parse_args()
    _warm()
    chosen = names(asked.patterns or ["*"], asked.named)
    count = -1 if asked.named else asked.samples
    record = asked.record or (OPAQUE if asked.opaque else RECORD)
    opaque = untranslated(lines()) if asked.opaque else None
    if asked.anew:
        unfinished = ROOT / ".cache" / f"operators-{record.name}"
        unfinished.parent.mkdir(exist_ok=True)
        sweep(chosen, count, unfinished, asked.jobs, opaque=opaque)
        shutil.move(unfinished, record)
    else:
        sweep(chosen, count, record, asked.jobs, asked.again, opaque)


if __name__ == "__main__":
    main()
