"""embedding_bag, by operators that have gradients."""

from __future__ import annotations

from typing import Any

import torch

from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import instead

__all__ = ["BAGS", "QUIRK"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="embedding_bag is a loop over the bags, without a gradient under dynamo; TorchScript refuses padding_idx, and the maximum of an empty "
    "bag is minus infinity",
)

_SUM, _MEAN, _MAX = 0, 1, 2


def _bags(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Each row that is read goes to its bag: the number of bags that begin at or before it.

    The other results of torch.embedding_bag, which torch.nn.functional drops, are None.
    """
    if scale_grad_by_freq:
        return NotImplemented
    starts = offsets[:-1] if include_last_offset else offsets
    begin = torch.zeros_like(torch.cat([indices, indices[:0], torch.zeros(1, dtype=indices.dtype)])).to(torch.int64)
    begin = begin.scatter_add(0, starts.to(torch.int64), torch.ones_like(starts).to(torch.int64))
    bag = begin.cumsum(0)[:-1] - 1
    rows = torch.embedding(weight, indices)
    counted = torch.ones_like(indices).to(torch.int64)
    if padding_idx is not None:
        padding = padding_idx % weight.shape[0]
        counted = (indices != padding).to(torch.int64)
    if include_last_offset:  # what stands behind the last offset is in no bag
        counted = counted * (torch.ones_like(counted).cumsum(0) <= offsets[-1]).to(torch.int64)
    skipped = (counted == 0).unsqueeze(1)
    places = bag.unsqueeze(1).expand_as(rows)
    none = torch.zeros_like(starts).to(weight.dtype).unsqueeze(1) * torch.zeros_like(weight[:1])
    count = torch.zeros_like(starts).to(torch.int64).scatter_add(0, bag, counted)
    if mode == _MAX:
        return _greatest(rows, skipped, places, none, count), None, None, None
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    total = none.scatter_add(0, places, torch.where(skipped, torch.zeros_like(rows), rows))
    if mode == _MEAN:
        total = total / count.clamp(min=1).to(total.dtype).unsqueeze(1)
    return total, None, None, None


def _greatest(rows: torch.Tensor, skipped: torch.Tensor, places: torch.Tensor, none: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The first of equal maxima has the gradient; an empty bag is 0."""
    known = torch.where(skipped, torch.full_like(rows, -torch.inf), rows).detach()
    most = (none - torch.inf).scatter_reduce(0, places, known, "amax", include_self=True)
    end = torch.ones_like(rows[:, :1]).sum(0).to(torch.int64)
    number = (torch.ones_like(rows.detach()).cumsum(0) - 1).to(torch.int64)
    candidates = torch.where(~skipped & (known == most.gather(0, places)), number, end)
    first = (torch.zeros_like(none).to(torch.int64) + end).scatter_reduce(0, places, candidates, "amin", include_self=True)
    padded = torch.cat([rows, torch.zeros_like(rows[:1])]) if rows.shape[0] == 0 else rows
    picked = padded.gather(0, torch.where(first == end, torch.zeros_like(first), first))
    return torch.where(count.unsqueeze(1) > 0, picked, torch.zeros_like(picked))


BAGS = {torch.embedding_bag: instead(_bags)}
