"""A process whose children save and are killed: ``python -m tests.exporter.files.killed FOLDER KIND named|unnamed ROUNDS``.

KIND is a key of `KINDS`. With ROUNDS, children that save two versions of the same models in turn are killed at that many random
points; without (0), one child is killed before, and one after, each system call that makes, moves or removes a name. After each
kill, what is at the paths must be of one version, whole; and one more save must leave the models and their data, nothing else.
The last line printed is JSON. Imports no torch, so that a child is there at once.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir

from exporter.files import save
from exporter.files.program import save_model, save_models

# file names, with external data?
KINDS = {"inside": (["m.onnx"], False), "outside": (["m.onnx"], True), "several": (["s.init.onnx", "s.onnx"], True)}
NAMES = ("link", "replace", "unlink", "open")


def model(version: int, size: int) -> ir.Model:
    """Two tensors of ``size`` numbers, each of them ``version``, and one that is small."""
    arrays = {"a": np.full(size, version, np.float32), "b": np.full(size, version, np.float32), "c": np.full(3, version, np.float32)}
    weights = [ir.Value(name=name, const_value=ir.tensor(array, name=name)) for name, array in arrays.items()]
    nodes = [ir.Node("", "Identity", [weight], name=f"n{weight.name}") for weight in weights]
    for node, array in zip(nodes, arrays.values(), strict=True):
        out = node.outputs[0]
        out.name, out.type, out.shape = f"y{node.name}", ir.TensorType(ir.DataType.FLOAT), ir.Shape(array.shape)
    graph = ir.Graph([], [n.outputs[0] for n in nodes], nodes=nodes, initializers=weights, opset_imports={"": 18}, name="g")
    return ir.Model(graph, ir_version=10)


def save_until(path: str, end: float) -> None:
    """Save one version after another, with data beside the model, until a moment comes."""
    for version in itertools.count():
        if time.time() > end:
            return
        save_model(model(version % 7, 3000), path, external_data=True)


def version_of(path: Path) -> int:
    """Which version is there; fails where it is not one, whole."""
    values = {
        float(x) for v in ir.load(path).graph.initializers.values() for x in (v.const_value.numpy().min(), v.const_value.numpy().max())
    }
    (version,) = values
    return int(version)


def data_of(path: Path) -> set[str]:
    """The names of the data files that a model names."""
    tensors = (value.const_value for value in ir.load(path).graph.initializers.values())
    return {str(tensor.location) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}


class Killed:
    """The children, and what is said of them."""

    def __init__(self, folder: Path, kind: str, size: int) -> None:
        names, self.external = KINDS[kind]
        self.folder, self.paths = folder, [folder / name for name in names]
        self.models = {version: [model(version, size) for _ in names] for version in (1, 2)}
        self.seen: Counter[str] = Counter()

    def save(self, version: int) -> None:
        save_models(list(zip(self.models[version], self.paths, strict=True)), external_data=self.external)

    def check(self) -> None:
        """What is there after a kill, and after one more save."""
        versions = [version_of(path) for path in self.paths]
        self.seen["kills"] += 1
        self.seen["mixed"] += len(set(versions)) > 1
        named = set().union(*map(data_of, self.paths))
        for name in set(os.listdir(self.folder)) - named - {path.name for path in self.paths}:
            owner = next(path.name for path in self.paths if name.startswith((f"{path.name}.", f".{path.name}.")))
            hidden = re.fullmatch(rf"\.{re.escape(owner)}\.[0-9a-f]{{16}}\.draft", name)
            assert hidden or re.fullmatch(rf"{re.escape(owner)}\.[0-9a-f]{{16}}\.data", name), name
            self.seen["drafts" if hidden else "data"] += 1
        self.save(random.choice((1, 2)))
        named = set().union(*map(data_of, self.paths))
        assert len(named) == (len(self.paths) if self.external else 0)
        assert set(os.listdir(self.folder)) == named | {path.name for path in self.paths}
        assert len({version_of(path) for path in self.paths}) == 1

    def child(self, work: Callable[[], None], after: float | None = None) -> bool:
        """Fork a child that works, kill it after so many seconds. Returns whether it was killed."""
        if (process := os.fork()) == 0:
            try:
                work()
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        if after is not None:
            time.sleep(after)
            os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return os.WIFSIGNALED(status)

    def forever(self) -> None:
        while True:
            self.save(2)
            self.save(1)

    def until(self, call: int, late: bool) -> None:
        """Save, and die at the given call."""
        calls = [0]
        for name in NAMES:
            setattr(os, name, dying(getattr(os, name), calls, call, late))
        self.save(2)


def dying(function: Callable[..., object], calls: list[int], call: int, late: bool) -> Callable[..., object]:
    def wrapped(*args: object, **keywords: object) -> object:
        calls[0] += 1
        if calls[0] == call and not late:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **keywords)
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped


def main(folder: str, kind: str, drafts: str, rounds: str) -> None:
    if drafts == "named":
        save._unnamed = lambda folder, mode: None
    killed = Killed(Path(folder), kind, 1 << 19 if int(rounds) else 1 << 10)
    start = time.perf_counter()
    for version in (2, 1, 2, 1):
        killed.save(version)
    pair = (time.perf_counter() - start) / 2
    for _ in range(int(rounds)):
        killed.child(killed.forever, random.uniform(0, 2 * pair))
        killed.check()
    for late in (False, True) if int(rounds) == 0 else ():
        call = 1
        while True:
            killed.save(1)
            if not killed.child(lambda call=call, late=late: killed.until(call, late)):
                break
            killed.check()
            call += 1
    assert "torch" not in sys.modules
    print(json.dumps(killed.seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
