"""A file of a force field in LAMMPS: its `fix external` asks Python for forces, which the file computes.

lmp = lammps(); ...; lmp.command("fix field all external pf/callback 1 1"); attach(lmp, "field", "field.onnx", cutoff=2.0)

One process, one kind of atoms and a cubic periodic box, as `examples.md.field` has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from examples.md.run import forces_of, neighbours

__all__ = ["attach"]


def attach(lammps: Any, fix: str, path: str | Path, cutoff: float, threads: int = 1) -> None:
    """Let a fix have the forces of the file, and its energy; `fix_modify ID energy yes` adds that to LAMMPS' own.

    Args:
        lammps: LAMMPS, with a cubic box and atoms in it.
        fix: The id of a `fix external` with `pf/callback 1 1`.
        path: The file.
        cutoff: How far apart two atoms of an edge may be.
        threads: Of onnxruntime.

    Raises:
        ValueError: The box is no cube, or shorter than two cutoffs.
    """
    forces, dtype = forces_of(path, threads)
    low, high, *_ = lammps.extract_box()
    length = high[0] - low[0]
    if not np.allclose(np.subtract(high, low), length) or length < 2 * cutoff:
        raise ValueError(
            f"the box is {np.subtract(high, low)} long: a cube of at least two cutoffs is what the list of neighbours here knows"
        )

    def called(_: Any, step: int, atoms: int, tags: np.ndarray, positions: np.ndarray, found: np.ndarray) -> None:
        now = np.array(positions[:atoms], dtype)
        energy, pushed = forces(now, *neighbours(now, length, cutoff))
        found[:atoms] = pushed
        lammps.fix_external_set_energy_global(fix, energy)

    lammps.set_fix_external_callback(fix, called, lammps)
