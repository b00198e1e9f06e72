"""Attention under a mask that leaves a query nothing to look at, as the padding of a batch does."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.quirks.quirk import Quirk

__all__ = ["QUIRK", "nothing_where_all_is_masked"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="where a mask leaves a query of scaled_dot_product_attention nothing to look at, eager gives zeros; the translation gives the mean of all values "
    "(torch.export, a mask of bools) or NaN (a mask of numbers)",
)

_MASK = 3  # its place among the arguments


def nothing_where_all_is_masked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call of attention, in which such a query looks at everything, and its result times zero. An optimizer folds a product better than a choice."""
    mask = args[_MASK] if len(args) > _MASK else kwargs.get("attn_mask")
    if mask is None:
        return func(*args, **kwargs)
    if mask.dtype is torch.bool:
        nothing = torch.logical_not(mask.any(-1, keepdim=True))
        opened = torch.logical_or(mask, nothing)
    else:
        nothing = mask.detach().amax(-1, keepdim=True) == -torch.inf
        opened = mask.masked_fill(nothing, 0.0).to(args[0].dtype if args else kwargs["query"].dtype)  # which eager converts
    if len(args) > _MASK:
        args = (*args[:_MASK], opened, *args[_MASK + 1 :])
    else:
        kwargs = {**kwargs, "attn_mask": opened}
    result = func(*args, **kwargs)
    return result * torch.logical_not(nothing).to(result.dtype)
