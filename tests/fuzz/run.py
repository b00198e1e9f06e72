"""Cases in forked children, each under limits, so that a child that dies is the finding of one case at one surface."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import exporter
from tests.fuzz import functions
from tests.fuzz.mutate import Case
from tests.fuzz.seeds import ABSOLUTE, CANARY
from tests.fuzz.surfaces import SURFACES, Problem, alone, attempt, iterate_outputs, watch_runtimes
from tests.fuzz.watch import METER, SPY, frames_of_dump, product_frame, whose

__all__ = ["Finding", "Summary", "run_cases"]

SECONDS = 5  # of the processor, for one case at one surface
SECONDS_PER_MIB = 30  # of the model beyond that: onnx_ir reads 0.6 MiB of nested nodes a second, a door may read a file thirteen times
SANITIZED = 77  # how a sanitizer ends a process (Makefile, asan)
HANGS = 40  # by the clock, and three times what the model's size allows
MEMORY = 1024  # MiB that one case may take, ours
ADDRESSES = 3 << 30  # bytes of addresses that a child may have beyond those of its start
BATCH = 5  # cases of a child: some leave a gigabyte of addresses behind, and a child has to have some left to start a thread


@dataclass
class Finding:
    """One thing found, as it is told."""

    case: int
    surface: int
    kind: str
    text: str
    error: str
    frame: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two findings the same."""
        file, _, function = self.frame.rpartition(":")[0].rpartition(":")
        return (self.surface, self.kind, self.error, f"{file}:{function}" if self.frame else re.sub(r"['/\d].*", "", self.text)[:60])


@dataclass
class Summary:
    """What all cases came to."""

    cases: int = 0
    ends: dict[int, Counter[str]] = field(default_factory=lambda: {number: Counter() for number in SURFACES})
    seconds: dict[int, float] = field(default_factory=lambda: dict.fromkeys(SURFACES, 0.0))  # of the processor, by surface
    findings: list[Finding] = field(default_factory=list)
    slowest: tuple[float, int, int] = (0.0, 0, 0)
    largest: tuple[float, int, int] = (0.0, 0, 0)
    tried_again: set[tuple[int, int]] = field(default_factory=set)  # (case, surface) of deaths that left no frame


# ------------------------------------------------------------------------------------------------------------- a child


def _lay(case: Case, base: Path) -> Path:
    """The case on the disk: a folder with its files, and beside it what no file may read."""
    for path in base.iterdir() if base.exists() else ():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder = base / "case"
    folder.mkdir(parents=True)
    (base / "cwd").mkdir()
    secret = base / "secret"
    secret.write_bytes(CANARY)
    path = f"{base}{'/' * (len(ABSOLUTE) - len(str(base)) - len('secret'))}secret"
    (folder / "model.onnx").write_bytes(case.model.replace(ABSOLUTE.encode(), path.encode()))
    for name, content in case.files.items():
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        if isinstance(content, str):
            target.symlink_to(content)
        else:
            target.write_bytes(content)
    os.chdir(base / "cwd")
    return folder / "model.onnx"


def _state(base: Path) -> dict[str, tuple[int, int]]:
    """Every file but what a surface may write."""
    found = {}
    for folder, _, names in os.walk(base):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.basename(path).split(".")[0] != "out" or folder != str(base / "case"):
                facts = os.lstat(path)
                found[path] = (facts.st_size, facts.st_mtime_ns)
        found[folder] = (0, 0)
    return found


def _one(surface: int, path: Path) -> dict[str, Any]:
    """One case at one surface, and all that can be seen of it from within."""
    base = path.parent.parent
    secret = base / "secret"
    for left in path.parent.glob("out*"):
        left.unlink()
    os.utime(secret, (1, os.stat(secret).st_mtime))  # so that a read shows, where the disk keeps times
    before, modules = _state(base), set(sys.modules)
    functions.RAN.clear()
    SPY.seen.clear()
    SPY.folder = str(path.parent)
    METER.start()
    start = time.process_time()
    extra = SECONDS_PER_MIB * path.stat().st_size / 2**20
    faulthandler.dump_traceback_later(HANGS + 3 * extra, exit=True, file=_TRACES[0])
    signal.setitimer(signal.ITIMER_PROF, SECONDS + extra)
    try:
        outcome, results = attempt(surface, path)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        SPY.folder = ""
    seconds = time.process_time() - start
    METER.stop()
    problems = outcome.problems
    if os.stat(secret).st_atime > 1 or any(CANARY[:40] in data for data in iterate_outputs(results)):
        problems.append(Problem("read outside", "the file beside the model's folder was read"))
    if changed := set(before.keys() ^ _state(base).keys()) or [k for k, v in _state(base).items() if before[k] != v]:
        problems.append(Problem("files", f"changed or left behind: {sorted(os.path.relpath(name, base) for name in changed)[:5]}"))
    problems += [Problem("outside", text) for text in dict.fromkeys(SPY.seen)]
    problems += [Problem("ran", text) for text in dict.fromkeys(functions.RAN)]
    problems += [
        Problem("imported", name) for name in sorted(set(sys.modules) - modules) if name.startswith(("tests.fuzz.", "this", "antigravity"))
    ]
    if METER.ours > MEMORY:
        problems.append(Problem("memory", f"{METER.ours:.0f} MiB"))
    return {"end": outcome.end, "problems": [asdict(p) for p in problems], "seconds": seconds, "mib": METER.ours}


_TRACES: list[Any] = []


def _child(work: list[tuple[int, list[int]]], make: Callable[[int], Case], folder: Path) -> None:
    """The body of a child: every case at its surfaces, a line before and after each."""
    log = (folder / "log").open("w", buffering=1)
    _TRACES[:] = [(folder / "trace").open("w")]
    faulthandler.enable(file=_TRACES[0])
    faulthandler.register(signal.SIGPROF, file=_TRACES[0], all_threads=True, chain=True)
    for number, path in ((1, os.devnull), (2, str(folder / "said"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESSES, used + ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    sys.dont_write_bytecode = True
    watch_runtimes()
    SPY.install()
    for number, numbers in work:
        path = _lay(make(number), folder / "base")
        for surface in numbers:
            log.write(json.dumps({"case": number, "surface": surface}) + "\n")
            _TRACES[0].seek(0)
            _TRACES[0].truncate()
            torch.manual_seed(0)
            log.write(json.dumps(_one(surface, path)) + "\n")


# ------------------------------------------------------------------------------------------------------------ the parent


@dataclass
class _Running:
    work: list[tuple[int, list[int]]]
    folder: Path
    since: float = field(default_factory=time.monotonic)
    pid: int = 0


def run_cases(
    numbers: Iterable[int],
    make: Callable[[int], Case],
    at: Callable[[int], list[int]],
    jobs: int,
    tell: Callable[[Finding], None] = lambda _: None,
    expected: Callable[[int, int], set[str]] = lambda *_: set(),
) -> Summary:
    """Run cases in children.

    Args:
        numbers: The cases.
        make: The case of a number; called in the child.
        at: At which surfaces a case is tried.
        jobs: How many children at a time.
        tell: Called with each finding, at once.
        expected: How a case may end at a surface; nothing for anything.
    """
    for door in ("inference_session", "load", "reference_evaluator", "build_gradient_graph", "build_tangent_graph"):
        getattr(exporter, door)  # imported here, not once in each child
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    summary = Summary()
    base = Path(tempfile.mkdtemp(prefix="pythonop-fuzz-"))
    waiting = _batches(numbers, at)
    again: list[list[tuple[int, list[int]]]] = []
    running: dict[int, _Running] = {}
    count = 0
    try:
        while True:
            while len(running) < jobs:
                work = again.pop() if again else next(waiting, None)
                if work is None:
                    break
                count += 1
                folder = base / str(count)
                folder.mkdir()
                running[_fork(work, make, folder)] = _Running(work, folder)
            if not running:
                return summary
            pid, status = _next(running)
            child = running.pop(pid)
            child.pid = pid
            rest = _collect(child, os.waitstatus_to_exitcode(status), make, summary, tell, expected)
            shutil.rmtree(child.folder)
            if rest:
                again.append(rest)
    finally:
        gc.unfreeze()
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(base, ignore_errors=True)


def _batches(numbers: Iterable[int], at: Callable[[int], list[int]]) -> Iterator[list[tuple[int, list[int]]]]:
    batch: list[tuple[int, list[int]]] = []
    for number in numbers:
        batch.append((number, at(number)))
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _fork(work: list[tuple[int, list[int]]], make: Callable[[int], Case], folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        _child(work, make, folder)
        status = 0
    except BaseException:
        (folder / "broken").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _next(running: dict[int, _Running]) -> tuple[int, int]:
    """The next child that ended; one that has said nothing for too long is ended."""
    while True:
        for pid, child in running.items():
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return pid, status
            with contextlib.suppress(OSError):
                child.since = max(child.since, time.monotonic() - (time.time() - (child.folder / "log").stat().st_mtime))
            if time.monotonic() - child.since > 4 * HANGS:  # its own limits should have ended it
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _collect(
    child: _Running, code: int, make: Callable[[int], Case], summary: Summary, tell: Callable[[Finding], None], expected: Any
) -> list[tuple[int, list[int]]]:
    """Take in what a child has said.

    Returns:
        The work that it left.
    """
    if (broken := child.folder / "broken").exists():
        raise RuntimeError(f"the fuzzer itself failed:\n{broken.read_text()}")
    lines = [json.loads(line) for line in (child.folder / "log").read_text().splitlines()]
    done: set[tuple[int, int]] = set()
    for start, end in zip(lines[::2], [*lines[1::2], None], strict=False):
        case, surface = start["case"], start["surface"]
        if end is None and _is_without_a_frame(child, code) and (case, surface) not in summary.tried_again:
            summary.tried_again.add((case, surface))
            continue
        done.add((case, surface))
        if end is None:
            end = (
                of_sanitizer(child.pid, child.folder)
                if code == SANITIZED
                else _death(code, (child.folder / "trace").read_text(errors="replace"))
            )
            if end["end"] == "finding" and code < 0 and _dies_alone(make(case), surface, child.folder / "alone"):
                end = {**end, "end": "runtime", "problems": []}
        summary.ends[surface][end["end"]] += 1
        summary.seconds[surface] += end["seconds"]
        summary.slowest = max(summary.slowest, (end["seconds"], case, surface))
        summary.largest = max(summary.largest, (end["mib"], case, surface))
        wanted = expected(case, surface)
        if wanted and end["end"] not in wanted and not end["problems"]:
            end["problems"] = [asdict(Problem("expectation", f"it ends with {end['end']}, not {' or '.join(sorted(wanted))}"))]
        for problem in end["problems"]:
            finding = Finding(case, surface, **problem)
            summary.findings.append(finding)
            tell(finding)
    rest = [(case, [s for s in numbers if (case, s) not in done]) for case, numbers in child.work]
    rest = [(case, numbers) for case, numbers in rest if numbers]
    summary.cases += len(child.work) - len(rest)
    return rest


def _is_without_a_frame(child: _Running, code: int) -> bool:
    """Whether a signal ended a child that left no frame of the case: faulthandler's own watchdog may die of frames that change while it reads them.

    What is of the case comes again.
    """
    return code < 0 and code != -signal.SIGPROF and not frames_of_dump((child.folder / "trace").read_text(errors="replace"))


def _dies_alone(case: Case, surface: int, base: Path) -> bool:
    """Whether the runtime ends the process with this file where nothing of ours is loaded into it."""
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            signal.alarm(SECONDS)
            alone(_lay(case, base), surface)
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code < 0 and code != -signal.SIGALRM


def of_sanitizer(pid: int, folder: Path) -> dict[str, Any]:
    """What a sanitizer said when it ended a child: it ends a runtime that asks for more memory than there is, which would raise otherwise.

    Args:
        pid: The child.
        folder: The child's; its standard error is the file ``said`` there: the sanitizer of undefined behaviour knows no other place.
    """
    path = re.search(r"log_path=([^:]+)", os.environ.get("ASAN_OPTIONS", ""))
    reports = [Path(f"{path[1]}.{pid}")] if path else []
    text = "".join(report.read_text(errors="replace") for report in (*reports, folder / "said") if report.exists())
    if "allocator is out of memory" in text and "onnxruntime_pybind11_state" in text:
        return {"end": "runtime", "problems": [], "seconds": 0.0, "mib": 0.0}
    first = next((line for line in text.splitlines() if "ERROR" in line or "runtime error" in line), "a report that is not to be found")
    return {"end": "finding", "problems": [asdict(Problem("sanitizer", first, "sanitizer", ""))], "seconds": 0.0, "mib": 0.0}


def _death(code: int, trace: str) -> dict[str, Any]:
    """A child that ended in the middle: its last frames say whose it was."""
    frames = frames_of_dump(trace)
    owner, where = whose(frames), product_frame(frames)
    slow = code == -signal.SIGPROF or code == 1
    seconds = float(SECONDS if code == -signal.SIGPROF else HANGS if code == 1 else 0)
    # A graph may compute for long. onnx.reference runs each step of a Loop, and the operators that it computes wrongly, through ours.
    on_reference = where.startswith(("exporter/runtime/reference.py:run:", "exporter/runtime/mended_operators.py:_run:"))
    if slow and (owner in ("runtime", "function") or on_reference):
        return {"end": "runtime", "problems": [], "seconds": 0.0, "mib": 0.0}
    name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
    kind = "too slow" if slow else "death"
    last = [f"{Path(file).name}:{function}:{line}" for file, function, line in frames[:-6:-1]]
    problem = Problem(kind, f"{name}, in {owner or 'nothing known'}: {' < '.join(last)}", name, where)
    return {"end": "finding", "problems": [asdict(problem)], "seconds": seconds, "mib": 0.0}
