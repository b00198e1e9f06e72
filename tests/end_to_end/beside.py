"""Many at once: what a process opens while others save to the same path, and what the threads of one process make of files.

    python -m tests.end_to_end.beside --loads 2000        beside three processes that save
    python -m tests.end_to_end.beside --rounds 2000       eight threads build gradient graphs, load, save, open and verify
    python -m tests.end_to_end.beside --rounds 2000 --seeds   the same, with the files that the fuzzer starts from

What fails is printed, counted by kind; none may.
"""

from __future__ import annotations

import argparse
import collections
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

import exporter
from exporter.files.program import save_model
from exporter.files.read import open_model
from exporter.runtime.usable import check_usable
from tests.exporter.files.killed import model, version_of
from tests.fuzz import seeds
from tests.zoo import functions as F

__all__ = ["Threads", "beside_savers"]

ALLOW = ["tests.zoo.functions:*", *seeds.ALLOW]


# -------------------------------------------------------------------------------------------------- beside processes that save


def _versions(values: Any) -> int:
    (version,) = {float(number) for array in values for number in np.asarray(array).reshape(-1)}
    return int(version)


OPENED: dict[str, Callable[[Path], int]] = {
    "load": lambda path: _versions(v.detach().numpy() for v in exporter.load(path).state_dict().values()),
    "inference_session": lambda path: _versions(exporter.inference_session(path).run(None, {})),
    "reference_evaluator": lambda path: _versions(exporter.reference_evaluator(path).run(None, {})),
}


def beside_savers(folder: Path, count: int, savers: int = 3, seconds: float = 3600.0) -> collections.Counter[str]:
    """Open a file again and again while processes save other versions of it, with data beside it.

    Returns:
        What was opened by which door, or failed and how -> how often. Each opened model is of one version, whole.
    """
    path = folder / "model.onnx"
    save_model(model(0, 3000), path, external_data=True)
    end = time.time() + seconds
    command = f"from tests.exporter.files.killed import save_until; save_until({str(path)!r}, {end})"
    processes = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", command]) for _ in range(savers)]
    found: collections.Counter[str] = collections.Counter()
    try:
        first = path.stat().st_ino
        while path.stat().st_ino == first:  # until they have begun
            time.sleep(0.01)
        for number in range(count):
            door = ("load", "load", "inference_session", "reference_evaluator")[number % 4]
            try:
                OPENED[door](path)
                found[door] += 1
            except Exception as error:
                found[f"failed: {door}: {type(error).__name__}: {error}".replace(str(folder), "")[:300]] += 1
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert version_of(path) < 7  # and what they leave is whole
    return found


# ------------------------------------------------------------------------------------------------------------ in threads


def honest() -> dict[str, bytes]:
    """Files of every kind: those that the fuzzer starts from and that need no others beside them."""
    return {f"seed{number}": seed.model for number, seed in enumerate(seeds.make_seeds().values()) if not seed.files}


class Net(torch.nn.Module):
    """A few operators whose rules compute with onnx_ir, and a Function."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        """Args: indices."""
        return F.SavesInput.apply(self.linear(self.table(i)).softmax(-1)).max(0).values


class Threads:
    """Files, and what a thread does with one of them.

    Attributes:
        outcomes: step -> how often it was done, or how it failed -> how often.
    """

    def __init__(self, folder: Path, files: dict[str, bytes] | None = None) -> None:
        """Args: where files go, and files to open beside our own."""
        self.folder, self.outcomes, self.counting = folder, collections.Counter[str](), threading.Lock()
        i = torch.tensor([0, 2, 4])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = exporter.export(Net(), (i,), dynamo=False)
        self.inputs = i
        self.files: dict[str, Any] = {"own": program.model_proto.SerializeToString(), **(files or {})}
        for name, data in self.files.items():
            (folder / f"{name}.onnx").write_bytes(data)
        self.said = {name: self._opened(name) for name in self.files}
        self.expected = self._gradients(exporter.load(folder / "own.onnx", allow=ALLOW))
        self.graph = ir.to_proto(exporter.build_gradient_graph(program)).SerializeToString()
        self.steps = (self.build, self.load, self.save, self.session, self.verify, self.open)

    def _gradients(self, module: Any) -> list[torch.Tensor]:
        module(self.inputs).square().sum().backward()
        return [parameter.grad for parameter in module.parameters()]

    def build(self, rng: random.Random) -> None:
        """A gradient graph is the one that a single thread makes."""
        assert ir.to_proto(exporter.build_gradient_graph(self.folder / "own.onnx")).SerializeToString() == self.graph

    def load(self, rng: random.Random) -> None:
        """A loaded module has the gradients that it has alone."""
        for one, two in zip(self._gradients(exporter.load(self.folder / "own.onnx", allow=ALLOW)), self.expected, strict=True):
            torch.testing.assert_close(one, two)

    def save(self, rng: random.Random) -> None:
        """A file is replaced by itself, with its data inside or beside it."""
        name = rng.choice([name for name, said in self.said.items() if said[-1] == ""])  # what is of use
        save_model(open_model(self.files[name]), self.folder / f"{name}.onnx", external_data=rng.random() < 0.5, check=False)

    def session(self, rng: random.Random) -> None:
        """A session opens, and runs."""
        exporter.inference_session(self.folder / "own.onnx", ALLOW).run(None, {"i": self.inputs.numpy()})

    def verify(self, rng: random.Random) -> None:
        """A gradient graph is valid and opens."""
        check_usable(exporter.build_gradient_graph(self.files["own"]))

    def open(self, rng: random.Random) -> None:
        """Any file, twice: each door says what it says to one thread alone."""
        name = rng.choice(list(self.files))
        for _ in range(2):
            assert self._opened(name) == self.said[name]

    def _opened(self, name: str) -> list[Any]:
        path, said = self.folder / f"{name}.onnx", list[Any]()
        for open_file in (self._state, self._session, lambda path: check_usable(open_model(path))):
            try:
                said.append(open_file(path))
            except exporter.PythonopError as error:
                said.append(type(error).__name__)
        return said

    @staticmethod
    def _state(path: Path) -> list[Any]:
        return [(name, value.tolist()) for name, value in exporter.load(path, allow=ALLOW).state_dict().items()]

    @staticmethod
    def _session(path: Path) -> list[Any]:
        session = exporter.inference_session(path, ALLOW)
        return [(value.name, value.type, value.shape) for value in (*session.get_inputs(), *session.get_outputs())]

    def step(self, number: int) -> None:
        """One of the steps, by its number."""
        step = self.steps[number % len(self.steps)]
        outcome = step.__name__
        try:
            step(random.Random(number))
        except Exception as error:
            outcome = f"failed: {outcome}: {type(error).__name__}: {error}".replace(str(self.folder), "")[:300]
        with self.counting:  # a Counter loses counts of threads: it reads and writes in two steps
            self.outcomes[outcome] += 1

    def run(self, rounds: int, threads: int = 8) -> collections.Counter[str]:
        """So many steps in so many threads, which start together."""
        gate = threading.Barrier(threads)
        numbers = iter(range(rounds))
        lock = threading.Lock()

        def work() -> None:
            gate.wait()
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                self.step(number)

        with ThreadPoolExecutor(threads) as pool:
            for each in [pool.submit(work) for _ in range(threads)]:
                each.result()
        return self.outcomes


def failures(outcomes: collections.Counter[str]) -> list[str]:
    """What failed, and how often."""
    return [f"{count} x {text}" for text, count in outcomes.items() if text.startswith("failed")]


def main() -> int:
    """Run what the command asks for; 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seeds", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wrong = 0
    for what in ("loads", "rounds"):
        count = getattr(options, what)
        if not count:
            continue
        with tempfile.TemporaryDirectory() as folder:
            start = time.monotonic()
            if what == "loads":
                found = beside_savers(Path(folder), count)
            else:
                found = Threads(Path(folder), honest() if options.seeds else None).run(count, options.threads)
            bad = failures(found)
            wrong += len(bad)
            print(
                f"{what}: {count} in {time.monotonic() - start:.0f} s, failed {sum(n for t, n in found.items() if t.startswith('failed'))}",
                dict(found),
            )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
