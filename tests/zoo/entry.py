"""What the zoo knows of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

__all__ = ["Entry"]


@dataclass
class Entry:
    """A model to export.

    Attributes:
        model, args: The model and example arguments of its forward.
        allow: What a fresh process has to allow.
        inlined: How many of eager's calls are inlined on their own (reentrant checkpoints).
        dynamic_shapes: As torch.export.export takes them, for entries whose sizes may vary.
        sized: For the same entries: (batch, length) -> arguments of these sizes.
    """

    model: nn.Module
    args: tuple[Any, ...]
    allow: list[str] = field(default_factory=list)
    inlined: int = 0
    dynamic_shapes: Any = None
    sized: Callable[[int, int], tuple[Any, ...]] | None = None
