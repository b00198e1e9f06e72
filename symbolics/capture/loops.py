"""Calls in the body of a scan or a loop: what one step hands to the next needs a gradient, though what the first is given may need none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.node.containers import expand_leaves

__all__ = ["as_handed_on"]


@contextlib.contextmanager
def as_handed_on(arguments: Any) -> Iterator[None]:
    """While the block runs, the float tensors of a call that stands in a body that torch.export traces once, for all steps, need a gradient.

    Args:
        arguments: Those of the call, in containers.
    """
    tensors: list[torch.Tensor] = []
    if private.in_body_of_a_loop():
        leaves = [leaf for leaf in expand_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        tensors = [leaf for leaf in leaves if leaf.is_floating_point() and leaf.is_leaf and not leaf.requires_grad]
    for tensor in tensors:
        tensor.requires_grad_()
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.requires_grad_(False)
