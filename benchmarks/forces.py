"""What a force field costs from a file beside eager: energy and forces (a gradient inside the forward), and a training step on the forces.

    python -m benchmarks.forces [--runs 25]

The networks are an MLP on distances and one of SchNet's kind (continuous-filter convolutions over all pairs). File and eager run in turns on one thread;
each ratio is the median of those of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

import onnxruntime
import torch
from torch import nn

import exporter
from benchmarks._report import Figure, tell
from benchmarks.tangents import rounds

#: File / eager. onnxruntime's Softplus takes ten times torch's, and is a third of SchNet's forward.
LIMITS = {"Mlp": 1.0, "SchNet": 1.7}
ATOMS = 32


class _Field(nn.Module):
    energy: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: float32 (molecules, atoms, 3); energies (molecules) and forces (molecules, atoms, 3)."""
        positions.requires_grad_(True)
        offsets = positions[:, :, None] - positions[:, None]
        distances = (offsets.square().sum(-1) + 1e-3).sqrt()
        energies = self.energy(distances)
        (slope,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        return energies, -slope


class Mlp(_Field):
    """All distances of a molecule, through an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(
            nn.Flatten(), nn.Linear(ATOMS * ATOMS, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1), nn.Flatten(0)
        )


class SchNet(_Field):
    """Three interactions of 64 features, 32 Gaussians."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms = nn.Parameter(torch.randn(ATOMS, 64) / 8)
        self.filters = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Softplus(), nn.Linear(64, 64)) for _ in range(3))
        self.updates = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 64)) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(64, 32), nn.Softplus(), nn.Linear(32, 1))
        self.register_buffer("centers", torch.linspace(0, 5, 32))

    centers: torch.Tensor

    def energy(self, distances: torch.Tensor) -> torch.Tensor:
        """distances: float32 (molecules, atoms, atoms); energies (molecules)."""
        spread = torch.exp(-10 * (distances[..., None] - self.centers).square())
        states = self.atoms.expand(distances.shape[0], -1, -1)
        for kernel, update in zip(self.filters, self.updates, strict=True):
            states = states + update((kernel(spread) * states[:, None]).sum(2))
        return self.head(states).sum((1, 2))


def _loss(found: tuple[torch.Tensor, torch.Tensor], energies: torch.Tensor, forces: torch.Tensor) -> torch.Tensor:
    return (found[0] - energies).square().mean() + 10 * (found[1] - forces).square().mean()


def _options() -> onnxruntime.SessionOptions:
    options = exporter.session_options()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return options


def row(kind: type[_Field], runs: int) -> list[Figure]:
    """The figures of one network."""
    torch.manual_seed(0)
    model, positions = kind(), torch.rand(4, ATOMS, 3) * 4
    targets = (torch.randn(4), torch.randn(4, ATOMS, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = exporter.export(model, (positions,))
        step = exporter.export_training_step(model, (positions,), loss=_loss, targets=targets, optimizer="adamw")
    session = exporter.inference_session(program.model, sess_options=_options())
    name = session.get_inputs()[0].name
    feeds = {name: positions.numpy()}

    trainer, layout = exporter.inference_session(step.model, sess_options=_options()), step.layout
    assert layout is not None
    values: dict[str, Any] = {each: onnxruntime.OrtValue.ortvalue_from_numpy(array) for each, array in step.initial.items()}
    for each, tensor in zip((*layout.inputs, *layout.targets), (positions, *targets), strict=True):
        values[each] = onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy())
    outputs = [output.name for output in trainer.get_outputs()]

    def ours() -> None:
        results = dict(zip(outputs, trainer.run_with_ort_values(outputs, values), strict=True))
        for output, each in layout.carried.items():
            values[each] = results[output]

    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def eager() -> None:
        optimizer.zero_grad()
        _loss(model(positions.detach()), *targets).backward()
        optimizer.step()

    found, expected = session.run(None, feeds), model(positions.detach())
    if any(abs(torch.as_tensor(a) - b.detach()).max() > 1e-4 * (1 + b.detach().abs().max()) for a, b in zip(found, expected, strict=True)):
        raise RuntimeError(f"{kind.__name__}: the file differs from eager")
    spent = rounds([lambda: session.run(None, feeds), lambda: model(positions.detach()), ours, eager], runs)
    what = f"{kind.__name__}, {positions.shape[0]} x {ATOMS} atoms"

    def figure(label: str, mine: int) -> Figure:
        ratio = statistics.median(times[mine] / times[mine + 1] for times in spent)
        seconds = [1e3 * statistics.median(times[place] for times in spent) for place in (mine, mine + 1)]
        return Figure(
            f"{what}: {label}, file / eager", ratio, "ratio", LIMITS[kind.__name__], runs, f"{seconds[0]:.1f} ms; eager {seconds[1]:.1f} ms"
        )

    return [figure("energy and forces", 0), figure("training step on forces", 2)]


def main() -> int:
    """Run and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    return tell("forces", [figure for kind in (Mlp, SchNet) for figure in row(kind, options.runs)])


if __name__ == "__main__":
    sys.exit(main())
