"""Shared by the tests: a fresh process that opens and runs saved files."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

ROOT = Path(__file__).resolve().parent.parent

_WORKER = """
import json, sys
import numpy as np
import exporter
for line in sys.stdin:
    job = json.loads(line)
    try:
        evaluator = exporter.reference_evaluator(job["path"], allow=job["allow"])
        inputs = dict(np.load(job["inputs"]))
        outputs = evaluator.run(None, inputs)
        np.savez(job["outputs"], **{f"o{i:03}": o for i, o in enumerate(outputs)})
        answer = {"ok": True}
    except Exception as error:
        answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
"""


class FreshProcess:
    """A process that never saw the model: it knows a file, its inputs and an allow list."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
        )

    def run(self, path: Path, inputs: dict[str, Any], allow: Sequence[str] = ()) -> list[np.ndarray]:
        """The outputs of a saved file; RuntimeError with the other process's error."""
        name = self.folder / uuid.uuid4().hex
        np.savez(f"{name}.in.npz", **{k: v.detach().numpy() if isinstance(v, torch.Tensor) else np.asarray(v) for k, v in inputs.items()})
        job = {"path": str(path), "inputs": f"{name}.in.npz", "outputs": f"{name}.out.npz", "allow": list(allow)}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if not answer["ok"]:
            raise RuntimeError(answer["error"])
        with np.load(f"{name}.out.npz") as data:
            return [data[key] for key in sorted(data)]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=60)


@contextlib.contextmanager
def counted_applies() -> Iterator[list[type]]:
    """Eager's calls of Function.apply (torch's own left out), counted without our code."""
    seen: list[type] = []
    depth = 0

    def listen(_frame: Any, event: str, called: Any) -> None:
        nonlocal depth
        if event not in ("c_call", "c_return", "c_exception") or getattr(called, "__name__", "") != "apply":
            return
        cls = getattr(called, "__self__", None)
        if not isinstance(cls, type) or not issubclass(cls, torch.autograd.Function):
            return
        if event != "c_call":
            depth -= 1
            return
        if depth == 0 and cls.__module__.split(".")[0] != "torch":
            seen.append(cls)
        depth += 1

    before = sys.getprofile()
    sys.setprofile(listen)  # on every torch, apply ends in a method of C
    try:
        yield seen
    finally:
        sys.setprofile(before)


def nodes(model: ir.Model, op_type: str | None = None) -> list[ir.Node]:
    """The nodes of a model, subgraphs included."""
    return [n for n in ir.traversal.RecursiveGraphIterator(model.graph) if op_type is None or n.op_type == op_type]
