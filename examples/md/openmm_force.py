"""A file of a force field in OpenMM: a PythonForce, as OpenMM 8.6 has it, whose function runs the file.

system.addForce(file_force("field.onnx", cutoff=2.0, length=4.8))

One kind of atoms and a cubic periodic box, as `examples.md.field` has it; OpenMM's units are kJ/mol and nm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openmm
from openmm import unit

from examples.md.run import forces_of, neighbours

__all__ = ["file_force"]


def file_force(path: str | Path, cutoff: float, length: float, threads: int = 1) -> openmm.PythonForce:
    """A force that a file computes of the positions.

    Args:
        path: The file.
        cutoff: How far apart two atoms of an edge may be.
        length: Of the box.
        threads: Of onnxruntime.
    """
    forces, dtype = forces_of(path, threads)

    def computed(state: Any) -> tuple[float, np.ndarray]:
        positions = state.getPositions(asNumpy=True).value_in_unit(unit.nanometer).astype(dtype)
        return forces(positions, *neighbours(positions, length, cutoff))

    force = openmm.PythonForce(computed)
    force.setUsesPeriodicBoundaryConditions(True)
    return force
