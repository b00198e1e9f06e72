"""The same dynamics from the file and by eager PyTorch: how far the energies drift, and how far the trajectories part.

python -m examples.md.compare [--steps 1000] [--double]

Where there is a C compiler, verlet.c runs the same file, too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from examples.md import native
from examples.md.field import Field, write
from examples.md.run import Forces, forces_of, simulate, start

__all__ = ["compare"]


def _eager(model: Field) -> Forces:
    def forces(*arrays: np.ndarray) -> tuple[float, np.ndarray]:
        energy, found = model(*map(torch.from_numpy, (arrays[0].copy(), *arrays[1:])))
        return float(energy.detach()), found.detach().numpy()

    return forces


def compare(steps: int, side: int = 3, dtype: torch.dtype = torch.float32, dynamo: bool = True) -> dict[str, float]:
    """Drifts of the energy an atom, the largest distance of two atoms of the trajectories after 100 steps, and atoms a second."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "field.onnx"
        model = write(str(path), dtype, dynamo)
        forces, kind = forces_of(path)
        positions, velocities, length = start(side, kind)
        told, seen = _python(steps, (forces, model), positions, velocities, length)
        program, shared = native.compile_verlet(folder, kind), native.library()
        if program is not None and shared is not None:
            run = lambda n: native.run(program, shared, path, positions, velocities, length, n)  # noqa: E731
            whole = run(steps)
            told["C: atoms a second"] = whole.speed
            told["C: drift of the energy an atom"] = whole.last - whole.first
            told["C: distance after 100 steps"] = float(abs(run(min(100, steps)).positions - seen["file"]).max())
    told["distance after 100 steps"] = float(abs(seen["file"] - seen["eager"]).max())
    return told


def _python(
    steps: int, fields: tuple[Forces, Field], positions: np.ndarray, velocities: np.ndarray, length: float
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """What the file and eager tell, and their positions after 100 steps."""
    told: dict[str, float] = {}
    seen: dict[str, np.ndarray] = {}
    for name, each in (("file", fields[0]), ("eager", _eager(fields[1]))):
        energies: list[float] = []

        def watch(step: int, energy: float, now: np.ndarray, name: str = name, energies: list[float] = energies) -> None:
            energies.append(energy)
            if step == min(100, steps) - 1:
                seen[name] = now

        before = time.perf_counter()
        simulate(each, positions, velocities, length, steps, watch)
        told[f"{name}: atoms a second"] = len(positions) * steps / (time.perf_counter() - before)
        told[f"{name}: drift of the energy an atom"] = (energies[-1] - energies[0]) / len(positions)
        told[f"{name}: spread of the energy an atom"] = float(np.std(energies)) / len(positions)
    return told, seen


def main() -> None:
    """Run and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--double", action="store_true")
    options = parser.parse_args()
    for name, value in compare(options.steps, dtype=torch.float64 if options.double else torch.float32).items():
        print(f"{name}: {value:.3g}")


if __name__ == "__main__":
    main()
