"""A small force field with a gradient in its forward, and its file.

python -m examples.md.field field.onnx
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import exporter

__all__ = ["CUTOFF", "Field", "write"]

CUTOFF = 2.0


class Field(nn.Module):
    """Atoms of one kind in a periodic box: a Lennard-Jones pair term, and a small network on what surrounds each atom; both end smoothly at CUTOFF."""

    def __init__(self, features: int = 32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.filters = nn.Parameter(torch.randn(16, features, generator=generator) / 4)
        self.mixing = nn.Parameter(torch.randn(features, features, generator=generator) / features**0.5)
        self.readout = nn.Parameter(torch.randn(features, generator=generator) / features**0.5)
        self.register_buffer("centers", torch.linspace(0.8, CUTOFF, 16))

    centers: torch.Tensor

    def forward(self, positions: torch.Tensor, edges: torch.Tensor, shifts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Energy (a scalar) and forces (atoms, 3), in reduced units.

        positions: (atoms, 3); edges: int64 (2, edges), each pair in both directions; shifts: (edges, 3), of whole boxes, added to the second atom.
        """
        positions.requires_grad_(True)
        first, second = edges[0], edges[1]
        distances = (positions[second] + shifts - positions[first]).square().sum(-1).sqrt()
        end = (1 - (distances / CUTOFF).square()).clamp(min=0).pow(3)
        sixth = distances.pow(-6)
        energy = (2 * end * (sixth * sixth - sixth)).sum()  # half of 4, as each pair is there twice
        spread = torch.exp(-4 * (distances[:, None] - self.centers).square()) @ self.filters * end[:, None]
        surroundings = torch.zeros(positions.shape[0], spread.shape[1], dtype=spread.dtype).index_add(0, first, spread)
        energy = energy + 0.05 * (torch.tanh(surroundings @ self.mixing) @ self.readout).sum()
        (slope,) = torch.autograd.grad(energy, positions)
        return energy, -slope


def write(path: str, dtype: torch.dtype = torch.float32, dynamo: bool = True) -> Field:
    """Write the file of the field, for any number of atoms and edges; the model that it is of."""
    model = Field().to(dtype)
    atoms, edges = torch.export.Dim("atoms", min=2), torch.export.Dim("edges", min=2)
    example = torch.rand(5, 3, dtype=dtype) * 3, torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]), torch.zeros(4, 3, dtype=dtype)
    program = exporter.export(model, example, dynamo=dynamo, dynamic_shapes=({0: atoms}, {1: edges}, {0: edges}))
    program.save(path)
    return model


if __name__ == "__main__":
    write(sys.argv[1])
