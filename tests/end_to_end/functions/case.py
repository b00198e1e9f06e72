"""A row of the table as something to export: a model around one expression, and its example arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["CASES", "Case", "Model", "case", "no_state", "x_input"]


class Model(nn.Module):
    """``body(model, *inputs)``, with a parameter ``weight`` and what ``state`` says."""

    def __init__(self, body: Callable[..., Any], state: dict[str, Any]) -> None:
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.tensor([0.5, 1.0, -1.5, 2.0]))
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *inputs: Any) -> Any:
        return self.body(self, *inputs)


def no_state() -> dict[str, Any]:
    return {}


def x_input() -> tuple[Any, ...]:
    return (torch.randn(3, 4),)


@dataclass
class Case:
    """How a row is exported and run.

    Attributes:
        body: ``body(model, *inputs)``.
        state: Makes parameters, buffers and submodules.
        inputs: Makes example inputs; called again for each run.
        dynamic: Whether dimension 0 of the first input is dynamic; the second run then has another size.
        setup: Called in both processes before anything else (what a user does: register, init_process_group).
        register: Called in the exporting process only with ``registered`` rows: the user's action that makes the row work.
        wrap: Makes the object to export of the Model (torch.compile).
        evaluation: Whether the model is in eval mode.
        raises: Whether eager's backward raises, and ours has to raise the same.
        loose: Tolerance for low precision.
        allow: What the fresh process lets the file name; default: everything of these tests.
        applies: How many nodes there should be, where eager's calls cannot be counted (it compiles, or torch calls them).
    """

    body: Callable[..., Any]
    state: Callable[[], dict[str, Any]] = no_state
    inputs: Callable[[], tuple[Any, ...]] = x_input
    dynamic: bool = False
    setup: Callable[[], Any] | None = None
    register: Callable[[], Any] | None = None
    wrap: Callable[[Any], Any] = staticmethod(lambda model: model)  # type: ignore[assignment]
    evaluation: bool = False
    raises: bool = False
    loose: float = 1e-5
    applies: int | None = None
    allow: list[str] | None = None

    def model(self) -> nn.Module:
        """The model, always with the same values."""
        torch.manual_seed(7)
        model = Model(self.body, self.state())
        return model.eval() if self.evaluation else model.train()


CASES: dict[str, Case] = {}


def case(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the body that follows a row of its name."""

    def add(body: Callable[..., Any]) -> Callable[..., Any]:
        assert body.__name__ not in CASES, f"two rows are called {body.__name__}"
        CASES[body.__name__] = Case(body, **options)
        return body

    return add
