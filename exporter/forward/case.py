"""Case: a model with everything that its export, its training and its verification need to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Case"]


@dataclass
class Case:
    """A model with everything that a command of ``pythonop`` needs of it: what the function behind a TARGET returns.

    Such a function may return ``(model, args)`` instead, where nothing else has to be said.

    Attributes:
        model: The model, in the mode (train or eval) that the file should have.
        args, kwargs: Example arguments of its forward.
        dynamic_shapes: Which sizes stay open, as torch.export.export takes them.
        targets: What the loss takes beside the output.
        loss: ``loss(output, *targets)``; None where the model returns its loss.
        inline: Functions whose own operations are written into the file, as `exporter.export` takes them.
        allow: What a process that opens the file may import: classes and patterns.
        portable: Functions and operators that become ONNX functions, as `exporter.export` takes them.
        opaque: Operators, modules and functions that become nodes that run PyTorch, as `exporter.export` takes them.
        functions: Modules whose calls become calls of ONNX functions, as `exporter.export` takes them.
        fallback: Whether to take the first way out that works, as in `exporter.export`.

    Examples:
        >>> def case():
        ...     return exporter.Case(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    """

    model: torch.nn.Module
    args: Any
    kwargs: dict[str, Any] | None = None
    dynamic_shapes: Any = None
    targets: tuple[Any, ...] = ()
    loss: Callable[..., Any] | None = None
    inline: tuple[Any, ...] = ()
    allow: tuple[Any, ...] = ()
    portable: Any = False
    opaque: Any = ()
    functions: Any = ()
    fallback: bool = False
