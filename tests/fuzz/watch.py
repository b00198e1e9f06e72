"""What a case does to its process and to the disk: memory, frames of errors, files opened, modules imported."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["METER", "SPY", "Frame", "frames_of", "frames_of_dump", "product_frame", "whose"]

ROOT = Path(__file__).resolve().parents[2]
Frame = tuple[str, str, int]  # file, function, line


# -------------------------------------------------------------------------------------------------------------- frames


def frames_of(error: BaseException) -> list[Frame]:
    """The frames of an error, the innermost last."""
    return [(frame.filename, frame.name, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]


def frames_of_dump(text: str) -> list[Frame]:
    """The frames in a dump of faulthandler: of the thread that runs the case, the innermost last."""
    parts = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)
    part = next((part for part in parts if "surfaces.py" in part), "")
    return [(file, name, int(line)) for file, line, name in re.findall(r'File "(.*?)", line (\d+) in (\S+)', part)][::-1]


def _owner(file: str) -> str:
    if file.startswith((f"{ROOT}/exporter/", f"{ROOT}/symbolics/")):
        return "product"
    if "/onnxruntime/" in file or "/onnx/reference/" in file:
        return "runtime"
    if file.endswith(("tests/fuzz/functions.py", "/torch/autograd/function.py")):
        return "function"
    return "engine" if "/torch/autograd/" in file else ""


def whose(frames: list[Frame]) -> str:
    """Whose an error is: of ``product``, its ``native`` library, a ``runtime``, or a ``function`` that the file runs."""
    owners = [(_owner(file), file) for file, _, _ in reversed(frames)]
    owners = [(owner, file) for owner, file in owners if owner]
    if owners and owners[0][0] == "engine":  # a Function's backward that returns what it may not
        after = next((file for owner, file in owners if owner != "engine"), "")
        return "function" if f"{ROOT}/exporter/runtime/" in after else "product"
    if owners and owners[0][1].endswith("exporter/runtime/session.py") and frames[-1][1] in ("_guard", "run_owning"):
        return "native"  # raised in C: what came through Python has frames of its own
    return owners[0][0] if owners else ""


def product_frame(frames: list[Frame]) -> str:
    """The innermost function of ours: ``exporter/files/read.py:function:line``."""
    for file, name, line in reversed(frames):
        if _owner(file) == "product":
            return f"{Path(file).relative_to(ROOT)}:{name}:{line}"
    return ""


# -------------------------------------------------------------------------------------------------------------- memory


class Meter:
    """The most memory that was resident, ours and the runtimes' apart, in MiB above where a surface began."""

    def __init__(self) -> None:
        self.base = self.ours = self.runtimes = 0.0
        self._depth = 0

    def start(self) -> None:
        """Begin a surface."""
        self.ours = self.runtimes = 0.0
        self._depth = 0
        _reset()
        self.base = _status("VmRSS")

    def stop(self) -> None:
        """End it: `ours` and `runtimes` are known."""
        self.ours = max(self.ours, _status("VmHWM") - self.base)

    @contextlib.contextmanager
    def runtime(self) -> Iterator[None]:
        """Around a call of a runtime."""
        self._depth += 1
        if self._depth > 1:
            try:
                yield
            finally:
                self._depth -= 1
            return
        self.stop()
        _reset()
        before = _status("VmRSS")
        try:
            yield
        finally:
            self._depth -= 1
            self.runtimes = max(self.runtimes, _status("VmHWM") - before)
            _reset()
            self.base += _status("VmRSS") - before


def _reset() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(f"{key}:"))


METER = Meter()


# ------------------------------------------------------------------------------------------------------ files, imports

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {
    "os.remove": 1,
    "os.rename": 2,
    "os.mkdir": 1,
    "os.rmdir": 1,
    "os.symlink": 2,
    "os.link": 2,
    "os.chmod": 1,
    "os.truncate": 1,
    "shutil.rmtree": 1,
}
_NEVER = {
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "pty.spawn",
    "socket.connect",
    "socket.bind",
    "webbrowser.open",
    "pickle.find_class",
}
_TRAPS = ("tests.fuzz.forbidden", "antigravity", "this")


class Spy:
    """Listens to Python's audit events while a surface is at work: which files it opens, what it imports, what it starts."""

    def __init__(self) -> None:
        self.folder = ""
        self.seen: list[str] = []
        self._readable = tuple({sys.prefix, sys.base_prefix, str(ROOT), "/usr", "/proc/self", "/dev/null", "/etc/localtime", "/sys/"})
        self._installed = False

    def install(self) -> None:
        """Listen; there is no way back, `folder` = "" is silence."""
        if not self._installed:
            self._installed = True
            sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.folder:
            return
        if event == "open":
            path, _, flags = arguments
            # A step below a folder that is open already (exporter.files.data_file): the event does not say which.
            if (
                isinstance(flags, int)
                and flags & os.O_NOFOLLOW
                and isinstance(path, str)
                and "/" not in path
                and path not in ("", ".", "..")
            ):
                return
            self._opened(path, bool(isinstance(flags, int) and flags & _WRITES))
        elif event == "import":
            if arguments[0].startswith(_TRAPS):
                self.seen.append(f"imported {arguments[0]}")
        elif event in _PATHS:
            for path in arguments[: _PATHS[event]]:
                # A file without a name gets its first one by a link from there.
                if not (event == "os.link" and os.fsdecode(path).startswith("/proc/self/fd/")):
                    self._opened(path, True, event)
        elif event in _NEVER:
            self.seen.append(f"{event} {str(arguments)[:200]}")

    def _opened(self, path: Any, writes: bool, event: str = "opened") -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        text = os.path.abspath(os.fsdecode(path))
        if text == self.folder or text.startswith(f"{self.folder}/"):
            if os.path.realpath(text).startswith(self.folder):
                return
        elif (not writes and text.startswith(self._readable)) or text in ("/dev/null", "/proc/self/clear_refs"):
            return
        self.seen.append(f"{event}{' for writing' if writes else ''} outside: {text[:300]}")


SPY = Spy()
