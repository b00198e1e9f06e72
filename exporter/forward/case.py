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
    """What a TARGET of the command line may return in place of ``(model, args)``.

    Attributes:
        model: The model, in the mode (train or eval) that the file should have.
        args, kwargs: Example arguments of its forward.
        dynamic_shapes: As torch.export.export takes them.
        targets: What the loss takes beside the output.
        loss: ``loss(output, *targets)``; None where the model returns its loss.
        inline: Functions to inline: classes, ``module:qualname`` or globs.
        allow: What a process that opens the file may import: classes and patterns.
        portable: Functions and operators to write as ONNX functions, so that the file needs no Python: True for all that can, or a list as ``inline``.
        opaque: Operators, modules and functions that become one PythonOp each, as `exporter.export` takes them.
        functions: Modules whose calls become calls of ONNX functions, likewise.
        fallback: Whether a way out is taken where torch's exporter cannot take the model, as `exporter.export` has it.
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
