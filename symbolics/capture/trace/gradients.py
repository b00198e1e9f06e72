"""Gradients that a forward takes, in a trace: it runs on real tensors, which go on with eager's values and eager's autograd graph."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from symbolics import torch_private as private

__all__ = ["fed", "real_gradients", "standing_for"]


def fed() -> torch.Tensor | None:
    """A tensor that stands for an input of the graph that is being traced; None where that has none, and where nothing is traced."""
    if not private.is_tracing():
        return None
    value = next((each for each in private.traced_graph().inputs() if each.type().kind() == "TensorType"), None)
    if value is None:
        return None
    tensor = torch.empty(0)
    private.set_traced_value(tensor, value)
    return tensor


def real_gradients(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], create_graph: bool
) -> Sequence[torch.Tensor | None]:
    """What eager computes; None for each where that passes through what only the file can run."""
    with private.paused_capture(), contextlib.suppress(Exception):
        return torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True, create_graph=create_graph, allow_unused=True)
    return [None] * len(inputs)


def standing_for(real: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    """Eager's gradient, for which the trace now knows the result."""
    if real is None:
        return result
    private.set_traced_value(real, private.traced_value(result))
    return real
