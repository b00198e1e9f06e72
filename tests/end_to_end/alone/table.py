"""The table of plain models: what they are made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.end_to_end.alone.compare import Given

__all__ = ["MODELS", "Net", "add", "net", "some"]

#: name -> makes the model and its arguments.
MODELS: dict[str, Callable[[], Given]] = {}


def add(make: Callable[[], Given]) -> Callable[[], Given]:
    """Make a row of a function that makes a model."""
    name = make.__name__.strip("_")
    assert name not in MODELS, f"two rows are called {name}"
    MODELS[name] = make
    return make


class Net(nn.Module):
    """``body(net, *args, **kwargs)`` over parts: modules, parameters, buffers, anything else."""

    def __init__(self, body: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def some(*sizes: int) -> torch.Tensor:
    """Random numbers, 3 by 4 where nothing is said."""
    return torch.randn(*sizes or (3, 4))


def net(body: Callable[..., Any], *args: Any, mode: bool = False, options: dict[str, Any] | None = None, **parts: Any) -> Given:
    """A `Net`, in eval mode where nothing is said."""
    return Given(Net(body, **parts).train(mode), args, options=options or {})
