"""verlet.c beside run.py: compile it, and run it on onnxruntime's shared library out of the pip package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime

from examples.md.run import read_state, write_state

__all__ = ["End", "compile_verlet", "library", "run"]

_HERE = Path(__file__).parent


@dataclass
class End:
    """What verlet.c tells: positions and velocities (atoms, 3), float64; the energies an atom after the first step and the last; atoms a second."""

    positions: np.ndarray
    velocities: np.ndarray
    first: float
    last: float
    speed: float


def library() -> Path | None:
    """onnxruntime's shared library in its pip package; None where it has none (Windows)."""
    found = [each for form in ("*.so.*", "*.dylib") for each in (Path(onnxruntime.__file__).parent / "capi").glob(f"libonnxruntime{form}")]
    return min(found, default=None)


def compile_verlet(folder: str | Path, dtype: type = np.float32) -> Path | None:
    """verlet.c as a program in a folder; None where there is no C compiler.

    Raises:
        RuntimeError: The compiler refuses it.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    program = Path(folder) / "verlet"
    kind = "double" if dtype is np.float64 else "float"
    header = _HERE.parents[1] / "exporter" / "runtime" / "native"
    command = [
        compiler,
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-DREAL={kind}",
        "-I",
        str(header),
        str(_HERE / "verlet.c"),
        "-o",
        str(program),
        "-lm",
        "-ldl",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{compiler} refuses verlet.c: {done.stderr}")
    return program


def run(program: Path, shared: Path, field: Path, positions: np.ndarray, velocities: np.ndarray, length: float, steps: int) -> End:
    """Run the program, in the folder where it lies.

    Raises:
        RuntimeError: The program fails; the message is its own.
    """
    begin, end = program.with_name("start.txt"), program.with_name("end.txt")
    write_state(begin, positions, velocities, length)
    done = subprocess.run([program, shared, field, begin, str(steps), end], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"verlet ends with {done.returncode}")
    speed = re.search(r"s: (\S+) atoms a second", done.stdout)
    energies = re.search(r"energy an atom: (\S+) at the start, (\S+) at the end", done.stdout)
    if speed is None or energies is None:
        raise RuntimeError(f"verlet says something else: {done.stdout}")
    there, fast, _ = read_state(end)
    return End(there, fast, float(energies[1]), float(energies[2]), float(speed[1]))
