"""Modules that fake-quantise by switches, tensors of their own: torch.export has no values to decide by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from symbolics.quirks.pytorch.observers import is_settled, settled
from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "switches_known"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="torch.ao's FakeQuantize asks its switches, buffers, what to do: torch.export fails at that; where nothing observes any more, buffers of modules "
    "with two names are written in vain, which torch.onnx.export(dynamo=True) cannot do",
)

_SWITCHES = ("fake_quant_enabled", "observer_enabled", "static_enabled", "learning_enabled")


class _Known:
    """A switch whose value is known: what ``module.switch[0]`` is, and ``.item()``."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __getitem__(self, index: int) -> float:
        return self.value

    def item(self) -> float:
        return self.value


@contextlib.contextmanager
def switches_known(model: torch.nn.Module) -> Iterator[None]:
    """Let an export see what the switches of fake quantisers are: a file is of the phase of training in which it is made."""
    shadows: list[tuple[torch.nn.Module, str, Any]] = []

    def shadow(module: torch.nn.Module, name: str, value: Any) -> None:
        shadows.append((module, name, module.__dict__.get(name, shadows)))
        module.__dict__[name] = value  # found before the buffer, which stays among the buffers

    try:
        for module in model.modules():
            switches = {name: value for name in _SWITCHES if isinstance(value := module._buffers.get(name), torch.Tensor)}
            if "fake_quant_enabled" not in switches or any(value.numel() != 1 or value.is_meta for value in switches.values()):
                continue
            numbers = {name: int(value) for name, value in switches.items()}
            if "fused_moving_avg_obs_fake_quant" not in type(module).forward.__code__.co_names:
                for name, number in numbers.items():
                    shadow(module, name, _Known(number))
                if isinstance(eps := module._buffers.get("eps"), torch.Tensor) and eps.numel() == 1:
                    shadow(module, "eps", _Known(float(eps)))
            elif not numbers.get("observer_enabled", 1) and is_settled(module):
                shadow(module, "forward", settled(module.forward, bool(numbers["fake_quant_enabled"])))
        yield
    finally:
        for module, name, before in reversed(shadows):
            del module.__dict__[name]
            if before is not shadows:
                module.__dict__[name] = before
