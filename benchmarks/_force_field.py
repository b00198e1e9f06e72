"""What wrappers of force fields share: a system, a strain, derivatives."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import nn

__all__ = ["ATOMS", "CUTOFF", "KINDS", "NUMBERS", "Tensors", "Wrapped", "derivatives", "strained", "system"]

ATOMS, KINDS, CUTOFF = 64, 3, 4.0
NUMBERS = (1, 6, 8)
Tensors = tuple[torch.Tensor, ...]


def system(atoms: int = ATOMS, cutoff: float = CUTOFF) -> Tensors:
    """Positions (atoms, 3), kinds (atoms), edges (2, edges), shifts (edges, 3) and cell (3, 3); about 13 edges an atom."""
    generator = torch.Generator().manual_seed(0)
    side = int(np.ceil(atoms ** (1 / 3)))
    grid = torch.stack(torch.meshgrid(*[torch.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)[:atoms]
    positions = grid * 2.3 + torch.rand(atoms, 3, generator=generator) * 0.5
    distances = (positions[:, None] - positions).norm(dim=-1) + torch.eye(atoms) * 1e9
    edges = torch.stack(torch.where(distances < cutoff))
    return positions, torch.randint(0, KINDS, (atoms,), generator=generator), edges, torch.zeros(edges.shape[1], 3), torch.eye(3) * 50


def strained(positions: torch.Tensor, shifts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A strain of zeros (3, 3) that moves positions and shifts: the energy's gradient with respect to it, over the volume, is the stress."""
    strain = torch.zeros(3, 3, dtype=positions.dtype).requires_grad_(True)
    symmetric = (strain + strain.T) / 2
    return positions + positions @ symmetric, shifts + shifts @ symmetric, strain


def derivatives(energy: torch.Tensor, positions: torch.Tensor, strain: torch.Tensor, cell: torch.Tensor) -> Tensors:
    """Energy, forces (atoms, 3) and stress (3, 3); the volume is a triple product, as onnxruntime has no determinant of float64."""
    slope, virial = torch.autograd.grad(energy.sum(), (positions, strain), create_graph=True)
    volume = (cell[0] * torch.linalg.cross(cell[1], cell[2])).sum().abs()
    return energy, -slope, virial / volume


class Wrapped(nn.Module):
    """What the benchmark asks of a model: its inputs, and which of their sizes are open.

    `forward` takes the inputs of `given` by position, and gives energy, forces (atoms, 3) and, of some, stress.
    """

    package: ClassVar[str]
    names: ClassVar[tuple[str, ...]] = ("positions", "kinds", "edges", "shifts", "cell")
    open: ClassVar[tuple[dict[int, str] | None, ...]] = ({0: "atoms"}, {0: "atoms"}, {1: "edges"}, {0: "edges"}, None)

    def given(self, atoms: int = ATOMS) -> Tensors:
        """Inputs of a system of so many atoms."""
        return system(atoms)
