"""Molecular dynamics from a file: the trajectory of eager PyTorch, without torch."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from examples.md.compare import compare
from examples.md.field import CUTOFF, write
from examples.md.run import DT, forces_of, neighbours, simulate, start
from tests.processes import python
from tests.support import missing


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_the_trajectory_of_eager(dynamo):
    told = compare(100, dtype=torch.float64, dynamo=dynamo)
    assert told["distance after 100 steps"] < 1e-12
    assert abs(told["file: drift of the energy an atom"] - told["eager: drift of the energy an atom"]) < 1e-12
    assert abs(told["eager: drift of the energy an atom"]) < 1e-4


def test_it_runs_without_torch(tmp_path):
    write(str(tmp_path / "field.onnx"))
    code = (
        "import sys; sys.modules.update(torch=None, exporter=None); from examples.md import run; "
        f"sys.argv = ['run', {str(tmp_path / 'field.onnx')!r}, '--steps', '20']; run.main()"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "108 atoms, 20 steps" in done.stdout


def test_the_calculator_of_ase(tmp_path):
    """ASE's velocity Verlet, with its own list of neighbours, gives the trajectory of `examples.md.run`."""
    if importlib.util.find_spec("ase") is None:
        missing("packages", "ase is not installed")
    from ase import Atoms
    from ase.md.verlet import VelocityVerlet

    from examples.md.ase_calculator import FileCalculator

    path = tmp_path / "field.onnx"
    write(str(path), torch.float64)
    positions, velocities, length = start(3, np.float64)
    atoms = Atoms(f"Ar{len(positions)}", positions=positions, cell=[length] * 3, pbc=True, masses=np.ones(len(positions)))
    atoms.calc = FileCalculator(path, CUTOFF)
    atoms.set_velocities(velocities)
    VelocityVerlet(atoms, timestep=DT).run(50)
    expected, _ = simulate(forces_of(path)[0], positions, velocities, length, 50, lambda *_: None)
    np.testing.assert_allclose(atoms.positions, expected, atol=1e-12)


def test_neighbours_over_the_faces_of_the_box():
    """Against the distances to all 27 images."""
    positions, _, length = start(3, np.float64)
    edges, shifts = neighbours(positions, length, 2.3)
    images = length * np.stack(np.meshgrid(*[[-1, 0, 1]] * 3, indexing="ij"), -1).reshape(-1, 3)
    apart = positions[None, :, None] + images - positions[:, None, None]
    near = np.square(apart).sum(-1) < 2.3**2
    near[np.arange(len(positions)), np.arange(len(positions)), 13] = False
    expected = {(i, j, *np.round(images[k], 6)) for i, j, k in zip(*np.nonzero(near), strict=True)}
    assert {(i, j, *np.round(shift, 6) + 0.0) for (i, j), shift in zip(edges.T, shifts, strict=True)} == expected
    assert edges.shape[1] == len(expected)
