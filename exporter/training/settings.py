"""The learning rates and weight decays of a trainer, as torch's schedulers want them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from exporter.training.carried import INPUTS, setting
from symbolics.errors import ArgumentError
from symbolics.text import clean

__all__ = ["Settings", "check_finite"]


def check_finite(name: str, value: Any) -> None:
    """That a learning rate or weight decay is a finite number: another one would destroy the parameters in one step.

    Raises:
        ArgumentError: It is NaN or infinite.
    """
    if not torch.isfinite(torch.as_tensor(value)).all():
        raise ArgumentError(f"{clean(name)} is {float(value)}: give a finite number")


class Settings(torch.optim.Optimizer):
    """An optimizer that has no parameters and makes no steps: its groups hold what a training step takes as inputs."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        """Of the state of a trainer, by the names of the step's inputs."""
        self._inputs: dict[str, tuple[int, str]] = {}  # input -> its group and key
        rates = [number for number in range(len(state)) if setting(INPUTS["lr"], number) in state]
        groups: list[dict[str, Any]] = []
        for place, number in enumerate(rates):
            groups.append({"params": [torch.empty(0)]})
            for key, name in INPUTS.items():
                if (name := setting(name, number)) in state:
                    self._inputs[name] = (place, key)
                    groups[-1][key] = float(state[name])
        super().__init__(groups or [{"params": [torch.empty(0)]}], {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nothing; schedulers want to see that it is called."""

    def write(self, state: dict[str, torch.Tensor]) -> None:
        """Put what the groups say into the state. They then say what it holds, so that a saved training goes on to the same bits.

        Raises:
            ArgumentError: One says NaN or an infinite number.
        """
        for name, (place, key) in self._inputs.items():
            group = self.param_groups[place]
            if float(group[key]) != float(state[name]):
                check_finite(name, float(group[key]))
                state[name] = torch.tensor(float(group[key]), dtype=state[name].dtype)
                group[key] = float(state[name])

    def read(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what the state holds."""
        for name, (place, key) in self._inputs.items():
            self.param_groups[place][key] = float(state[name])
