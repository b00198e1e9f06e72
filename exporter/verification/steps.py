"""A step, as each side of `verify` makes it: tensors out of a result, and cotangents back through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["backward", "tensors_of"]


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of what a model returned, flat."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def backward(outputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor | None]) -> None:
    """Run autograd from the outputs that have a gradient; the others, and those without a cotangent, are left out."""
    roots = [(out, g.to(out.dtype)) for out, g in zip(outputs, cotangents, strict=True) if g is not None and out.requires_grad]
    if roots:
        torch.autograd.backward([out for out, _ in roots], [g for _, g in roots])
