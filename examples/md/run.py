"""Molecular dynamics from a file, with numpy and onnxruntime alone: velocity Verlet in a periodic box.

    python -m examples.md.run field.onnx [--steps 1000]
    python -m examples.md.run field.onnx --write-start start.txt        # where verlet.c begins

No torch, and nothing of pythonop: the file is plain ONNX, gradient included. `python -m examples.md.compare` runs eager PyTorch beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime

__all__ = ["DT", "forces_of", "neighbours", "read_state", "simulate", "start", "write_state"]

DT = 0.002
_CUTOFF, _SKIN = 2.0, 0.3

#: positions, edges, shifts -> energy, forces
Forces = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[float, np.ndarray]]


def forces_of(path: str | Path, threads: int = 1) -> tuple[Forces, type]:
    """What a file computes, and its type of floats."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    dtype = np.float64 if "double" in session.get_inputs()[0].type else np.float32

    def forces(*arrays: np.ndarray) -> tuple[float, np.ndarray]:
        energy, found = session.run(None, dict(zip(names, arrays)))
        return float(energy), found

    return forces, dtype


def start(side: int, dtype: type, temperature: float = 0.5) -> tuple[np.ndarray, np.ndarray, float]:
    """Positions and velocities of 4 side**3 atoms on a face-centred lattice, and the length of the box."""
    draw = np.random.default_rng(0)
    length = side * 1.6
    basis = np.array([[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]]) / 2
    cells = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 1, 3)
    positions = ((cells + basis).reshape(-1, 3) * 1.6 + 0.01 * draw.standard_normal((4 * side**3, 3))).astype(dtype)
    velocities = np.sqrt(temperature) * draw.standard_normal(positions.shape)
    return positions, (velocities - velocities.mean(0)).astype(dtype), length


def write_state(path: str | Path, positions: np.ndarray, velocities: np.ndarray, length: float) -> None:
    """Write a state as text: the number of atoms and the length of the box, then a line an atom, with position and velocity, exact to the last bit."""
    lines = [f"{len(positions)} {length:.17g}", *(" ".join(f"{x:.17g}" for x in row) for row in np.hstack([positions, velocities]))]
    Path(path).write_text("\n".join(lines) + "\n")


def read_state(path: str | Path) -> tuple[np.ndarray, np.ndarray, float]:
    """Positions and velocities (atoms, 3), float64, and the length of the box, of what `write_state` or verlet.c has written."""
    head, *rows = Path(path).read_text().splitlines()
    state = np.array([row.split() for row in rows], dtype=np.float64).reshape(int(head.split()[0]), 6)
    return state[:, :3], state[:, 3:], float(head.split()[1])


def neighbours(positions: np.ndarray, length: float, cutoff: float) -> tuple[np.ndarray, np.ndarray]:
    """Edges (2, edges) of all pairs nearer than the cutoff, in both directions and over the box's faces, and their shifts (edges, 3)."""
    apart = positions[None] - positions[:, None]
    shifts = -length * np.round(apart / length)
    distances = np.square(apart + shifts).sum(-1)
    np.fill_diagonal(distances, np.inf)
    edges = np.stack(np.nonzero(distances < cutoff**2)).astype(np.int64)
    return edges, shifts[edges[0], edges[1]].astype(positions.dtype)


def simulate(
    forces: Forces,
    positions: np.ndarray,
    velocities: np.ndarray,
    length: float,
    steps: int,
    watch: Callable[[int, float, np.ndarray], None],
) -> tuple[np.ndarray, np.ndarray]:
    """Velocity Verlet with masses of 1; positions and velocities at the end. ``watch`` gets the step, the whole energy, and the positions.

    The list of neighbours holds pairs up to a skin beyond the cutoff, and is made anew when an atom has moved half of that.
    """
    if length < 2 * (_CUTOFF + _SKIN):
        raise ValueError(f"the box is {length:g} long: the nearest images alone are looked at, so give at least {2 * (_CUTOFF + _SKIN):g}")
    listed, (edges, shifts) = positions, neighbours(positions, length, _CUTOFF + _SKIN)
    energy, now = forces(positions, edges, shifts)
    half = positions.dtype.type(DT / 2)
    for step in range(steps):
        velocities = velocities + half * now
        positions = positions + 2 * half * velocities
        if np.square(positions - listed).sum(-1).max() > (_SKIN / 2) ** 2:
            listed, (edges, shifts) = positions, neighbours(positions, length, _CUTOFF + _SKIN)
        energy, now = forces(positions, edges, shifts)
        velocities = velocities + half * now
        watch(step, energy + 0.5 * float(np.square(velocities, dtype=np.float64).sum()), positions)
    return positions, velocities


def main() -> None:
    """Run and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--side", type=int, default=3, help="cells of four atoms along an edge of the box")
    parser.add_argument("--write-start", metavar="FILE", help="write the start to this file, and run nothing")
    options = parser.parse_args()
    forces, dtype = forces_of(options.file)
    positions, velocities, length = start(options.side, dtype)
    if options.write_start:
        write_state(options.write_start, positions, velocities, length)
        return
    energies: list[float] = []
    before = time.perf_counter()
    simulate(forces, positions, velocities, length, options.steps, lambda step, energy, _: energies.append(energy))
    spent = time.perf_counter() - before
    print(f"{len(positions)} atoms, {options.steps} steps in {spent:.1f} s: {len(positions) * options.steps / spent:.3g} atoms a second")
    print(f"energy an atom: {energies[0] / len(positions):.6f} at the start, {energies[-1] / len(positions):.6f} at the end")


if __name__ == "__main__":
    main()
