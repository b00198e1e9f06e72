"""Train saved files with any optimizer of torch: no model code, a file and onnxruntime.

Usage::

    python -m examples.train                       # BLOOM and a spiking network, exported here, trained beside eager PyTorch
    python -m examples.train --picture curves.png  # the curves in one picture
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import exporter
from examples import demo

STEPS = 200


@dataclass
class Task:
    """Something to learn.

    Attributes:
        model, args: The network and the one batch that it learns.
        loss: From its output to a scalar.
        rate: AdamW's learning rate: it at least halves the loss.
        allow: The Functions that the file may name.
    """

    model: torch.nn.Module
    args: tuple[torch.Tensor, ...]
    loss: Callable[[Any], torch.Tensor]
    rate: float
    allow: list[str]


@dataclass
class Training:
    """The loss of each step, and the gradients of the first."""

    losses: list[float] = field(default_factory=list)
    first: dict[str, torch.Tensor] = field(default_factory=dict)


def bloom() -> Task:
    """The demo's BLOOM, next-token prediction."""
    case = demo.bloom()
    ids = case.args[0]

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return Task(case.model, case.args, loss, 3e-3, case.allow)


class Spiking(torch.nn.Module):
    """Two layers of snntorch's Leaky neurons over four time steps: (4, batch, 10) -> spikes and potentials, (4, batch, 4) each."""

    def __init__(self) -> None:
        import snntorch
        from snntorch import surrogate

        super().__init__()
        self.first, self.second = torch.nn.Linear(10, 16), torch.nn.Linear(16, 4)
        self.leaky = snntorch.Leaky(beta=0.9, spike_grad=surrogate.atan(alpha=2.0))
        self.output = snntorch.Leaky(beta=0.8, spike_grad=surrogate.fast_sigmoid(slope=25))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        membrane, potential = self.leaky.init_leaky(), self.output.init_leaky()
        spikes, potentials = [], []
        for current in x.unbind(0):
            spike, membrane = self.leaky(self.first(current), membrane)
            # snntorch's spikes are float32 whatever goes in: a network of another type converts them.
            spike, potential = self.output(self.second(spike.to(x.dtype)), potential)
            spikes.append(spike.to(x.dtype))
            potentials.append(potential)
        return torch.stack(spikes), torch.stack(potentials)


def spiking() -> Task:
    """Potentials that follow a target, and half of the neurons firing."""
    torch.manual_seed(0)
    model, x = Spiking(), 3 * torch.randn(4, 2, 10)
    target = torch.randn(4, 2, 4)

    def loss(out: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        spikes, potentials = out
        return (potentials - target).square().mean() + 0.1 * (spikes.mean(0) - 0.5).square().mean()

    return Task(model, (x,), loss, 1e-2, ["snntorch.surrogate"])


TASKS: dict[str, tuple[str, Callable[[], Task]]] = {"bloom": ("BLOOM", bloom), "snn": ("snntorch network", spiking)}


def train(model: torch.nn.Module, task: Task, steps: int = STEPS) -> Training:
    """Train a model, in place, on the batch of a task."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
    result = Training()
    for step in range(steps):
        optimizer.zero_grad()
        loss = task.loss(model(*task.args))
        loss.backward()
        if not step:
            result.first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        result.losses.append(loss.item())
    return result


def both(task: Task, path: Path, steps: int = STEPS, dynamo: bool = True) -> tuple[Training, Training, torch.nn.Module]:
    """Export a model to a path, train it in eager and from the file.

    Returns:
        Eager's training, the file's, and the loaded module. The task's model is left as it was.
    """
    exporter.export(copy.deepcopy(task.model), task.args, dynamo=dynamo).save(path)
    module = exporter.load(path, allow=task.allow)
    return train(copy.deepcopy(task.model), task, steps), train(module, task, steps), module


def agree(eager: Training, file: Training) -> bool:
    """Whether both learned, and the same.

    The median distance, not the largest: a spiking network is chaotic, one rounding decides in the end whether a neuron fires. How
    far a file may be from eager is measured by benchmarks/training_curves.py.
    """
    gaps = [abs(a - b) for a, b in zip(file.losses, eager.losses, strict=True)]
    halved = all(one.losses[-1] <= one.losses[0] / 2 for one in (eager, file))
    return halved and statistics.median(gaps) <= 1e-4 * eager.losses[0]


def draw(curves: dict[str, tuple[list[float], list[float]]], path: Path) -> None:
    """One picture: for each title the losses of eager and of the file, above how far they are apart.

    Raises:
        ImportError: matplotlib is not installed (the extra ``demo``).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(curves), 5), layout="constrained")
    axes = figure.subplots(2, len(curves), sharex="col", height_ratios=(3, 1), squeeze=False)
    for column, (title, (eager, file)) in enumerate(curves.items()):
        above, below = axes[:, column]
        above.plot(eager, linewidth=6, color="#cfd8e3", label="eager PyTorch")
        above.plot(file, linewidth=1.4, color="#0969da", label="loaded file, onnxruntime")
        above.set(title=title, ylabel="loss", ylim=(0, None))
        above.legend(frameon=False)
        gap = [abs(a - b) for a, b in zip(file, eager, strict=True)]
        below.plot([value or None for value in gap], ".", markersize=3, color="#cf222e")  # a logarithmic axis has no 0
        below.set(yscale="log", xlabel="step", ylabel="difference")
        for one in (above, below):
            one.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    """0 where every file learned what eager did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", choices=TASKS, action="append")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(argv)
    demo.quiet()

    curves, ok = {}, True
    for key in options.only or TASKS:
        title, factory = TASKS[key]
        task = factory()
        with tempfile.TemporaryDirectory() as folder:
            eager, file, module = both(task, Path(folder, f"{key}.onnx"), options.steps)
        gap = max(abs(a - b) for a, b in zip(file.losses, eager.losses, strict=True))
        found, wanted = (f"{t.losses[0]:.4f} -> {t.losses[-1]:.4f}" for t in (file, eager))
        print(f"{title}: loss {found} from the file, {wanted} in eager; largest gap {gap:.1e}")
        # What was learned goes back into the model that was exported.
        task.model.load_state_dict(module.state_dict())
        curves[title] = (eager.losses, file.losses)
        ok &= agree(eager, file)
    if options.picture is not None:
        draw(curves, options.picture)
        print(f"wrote {options.picture}")
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
