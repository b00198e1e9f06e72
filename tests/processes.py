"""Other Pythons for the tests, the one place that starts them.

`python` runs one once. `Server` is one that answers jobs with a function of a module, so that the start is paid once.
`Forks` is for modules that run as ``__main__`` and end: each runs in a process of its own, forked off one that has imported
torch and onnxruntime and nothing else. This module imports no torch: the processes decide what they know.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import runpy
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Forks", "FreshProcess", "Server", "python"]

ROOT = Path(__file__).resolve().parent.parent


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def python(*arguments: str, cwd: Path = ROOT, timeout: float = 400, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a new Python says to these arguments; it finds exporter, symbolics and tests wherever it stands."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=_environment(**environment), capture_output=True, text=True, timeout=timeout, check=False)


class Server:
    """A process that answers jobs; it starts with the first, and again when a job killed it.

    Args:
        folder: Where jobs and answers lie.
        target: ``package.module:function``, which makes the answer of a job; both are pickled.
    """

    def __init__(self, folder: Path, target: str) -> None:
        self.folder, self.target = folder, target
        self._process: subprocess.Popen[str] | None = None

    def ask(self, job: Any) -> Any:
        """The answer; RuntimeError where the process ended instead."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-W", "ignore", "-m", "tests.processes", self.target]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(), cwd=self.folder
            )
        path = self.folder / f"{uuid.uuid4().hex}.pkl"
        path.write_bytes(pickle.dumps(job))
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(str(path)) + "\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError(f"the fresh process ended with code {self._process.wait()}")
        answer = pickle.loads(path.read_bytes())
        path.unlink()
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait(timeout=60)


def _serve(answer: Callable[[Any], Any]) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what a job prints is no answer
    for line in sys.stdin:
        path = Path(json.loads(line))
        path.write_bytes(pickle.dumps(answer(pickle.loads(path.read_bytes()))))
        answers.write("done\n")
        answers.flush()


# ------------------------------------------------------------------------------------------------- runs of a saved file


def run_file(job: dict[str, Any]) -> dict[str, Any]:
    """The outputs of a saved file on onnx.reference, or the error."""
    import exporter

    try:
        return {"outputs": exporter.reference_evaluator(job["path"], allow=job["allow"]).run(None, job["inputs"])}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


class FreshProcess(Server):
    """A process that never saw the model: it knows a file, its inputs and an allow list."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "tests.processes:run_file")

    def run(self, path: Path, inputs: dict[str, Any], allow: Any = ()) -> list[Any]:
        """The outputs of a saved file; RuntimeError with the other process's error."""
        arrays = {name: value.detach().numpy() if hasattr(value, "detach") else value for name, value in inputs.items()}
        answer = self.ask({"path": str(path), "inputs": arrays, "allow": list(allow)})
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["outputs"]  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------------------------- forks


class Forks(Server):
    """Stands in for ``python -P -m MODULE ...``, without the seconds that the imports take."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "tests.processes:run_module")

    @contextlib.contextmanager
    def instead_of(self, *modules: str) -> Iterator[None]:
        """Whoever runs `fresh_python` of one of these modules here, or ``[sys.executable, "-m", module, ...]``, gets a fork."""
        from exporter.files.fresh import fresh_python

        start = subprocess.run

        def run(command: Any, **options: Any) -> Any:
            for module in modules:
                for own, path in ((fresh_python(module), sys.path), ([sys.executable, "-m", module], None)):
                    if command[: len(own)] == own:
                        places = None if path is None else [entry or os.getcwd() for entry in path]
                        environment = options.get("env") or {}
                        status, out, err = self.ask(
                            {"module": module, "arguments": command[len(own) :], "environment": environment, "path": places}
                        )
                        return subprocess.CompletedProcess(command, status, out, err)
            return start(command, **options)

        subprocess.run = run  # type: ignore[assignment]
        try:
            yield
        finally:
            subprocess.run = start


def run_module(job: dict[str, Any]) -> tuple[int, str, str]:
    """Status, output and errors of a module that runs as ``__main__`` in a fork of this process."""
    import onnxruntime
    import torch

    import exporter

    assert torch and onnxruntime and exporter.load
    files = [Path(f"{uuid.uuid4().hex}.{kind}") for kind in ("out", "err")]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for number, file in enumerate(files, 1):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
            sys.stdout = os.fdopen(1, "w")
            os.environ.update(job["environment"])
            sys.path[:0] = job["environment"].get("PYTHONPATH", "").split(os.pathsep)  # where Python puts them
            sys.path[:] = job["path"] or sys.path
            sys.argv = [job["module"], *job["arguments"]]
            runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # nothing of the parent is ended here
    _, status = os.waitpid(child, 0)
    out, err = (file.read_text() for file in files)
    for file in files:
        file.unlink()
    return os.waitstatus_to_exitcode(status), out, err


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    _serve(getattr(importlib.import_module(module), function))
