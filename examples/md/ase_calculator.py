"""A file of a force field as a calculator of ASE: energies and forces for its optimizers, dynamics and phonons.

atoms.calc = FileCalculator("field.onnx", cutoff=2.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from ase.calculators.calculator import Calculator, all_changes
from ase.neighborlist import neighbor_list

from examples.md.run import forces_of

__all__ = ["FileCalculator"]


class FileCalculator(Calculator):
    """Energy and forces of a file that takes positions, edges and shifts, as `examples.md.field` writes it.

    Args:
        path: The file.
        cutoff: How far apart two atoms of an edge may be.
        threads: Of onnxruntime.
        **options: As ASE's Calculator takes them.
    """

    implemented_properties: ClassVar[list[str]] = ["energy", "forces"]

    def __init__(self, path: str | Path, cutoff: float, threads: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self._forces, self._dtype = forces_of(path, threads)
        self._cutoff = cutoff

    def calculate(
        self, atoms: Any = None, properties: Sequence[str] = ("energy",), system_changes: Sequence[str] = tuple(all_changes)
    ) -> None:
        """Fill ``results``."""
        super().calculate(atoms, list(properties), list(system_changes))
        first, second, boxes = neighbor_list("ijS", self.atoms, self._cutoff)
        edges = np.stack([first, second]).astype(np.int64)
        shifts = (boxes @ np.asarray(self.atoms.cell)).astype(self._dtype)
        energy, forces = self._forces(self.atoms.positions.astype(self._dtype), edges, shifts)
        self.results = {"energy": energy, "forces": forces.astype(np.float64)}
