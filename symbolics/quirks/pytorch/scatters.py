"""Writes at indices, where several go to one place."""

from __future__ import annotations

import math
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, call, in_place, instead

__all__ = ["QUIRK", "SCATTERS"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="TorchScript's index_add loses what goes to one place twice, dynamo's what is in a tensor without dimensions; scatter_reduce('mean') is the sum under dynamo, and with "
    "include_self=False its gradient is NaN; index_reduce has no translation; the gradient of index_fill's value counts an index that is given twice; onnxruntime "
    "fails at a source that is larger than the index",
)


def _along(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The indices of one dimension as those of each element of the source."""
    view = [1] * source.dim()
    if view:
        view[dim] = -1
    return index.reshape(view).expand_as(source)


def _is_empty_beside(source: torch.Tensor, dim: int) -> bool:
    """Whether a tensor has no elements, however many rows it has along an axis, which may be open."""
    return 0 in (size for axis, size in enumerate(source.shape) if axis != dim % source.dim())


def _index_add(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
    if x.dim() == 0:
        return x + alpha * source.reshape(())
    if not private.is_tracing():
        return NotImplemented
    if _is_empty_beside(source, dim):
        return x.clone()
    source = source if alpha == 1 else source * alpha
    return x.scatter_add(dim, _along(x, dim, index, source), source)


def _index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    """By a mask, which knows no number of times."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad or x.dim() == 0:
        return NotImplemented
    length = x.shape[dim]
    places = torch.zeros(length, dtype=torch.int64).scatter(0, index.reshape(-1) % length, torch.ones_like(index.reshape(-1)))
    view = [1] * x.dim()
    view[dim] = -1
    return torch.where((places > 0).reshape(view), value.to(x.dtype), x)


_NEUTRAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": -math.inf, "amin": math.inf}


def _scatter_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    """A mean is a sum and a count; what is not included is first replaced by what changes nothing."""
    if (include_self and reduce != "mean") or not x.is_floating_point() or x.dim() == 0:
        return NotImplemented
    start = x if include_self else x.scatter(dim, index, _NEUTRAL[reduce])
    if reduce != "mean":
        return start.scatter_reduce(dim, index, src, reduce, include_self=True)
    kept = torch.ones_like(x.detach())
    kept = kept if include_self else kept.scatter(dim, index, 0.0)
    return start.scatter_add(dim, index, src) / kept.scatter_add(dim, index, torch.ones_like(src.detach()))


def _index_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    if x.dim() == 0:
        return _index_reduce(x.reshape(1), 0, index.reshape(1), source.reshape(1), reduce, include_self=include_self).reshape(())
    if _is_empty_beside(source, dim):
        return x.clone()
    indices = _along(x, dim, index, source)
    found = _scatter_reduce(x, dim, indices, source, reduce, include_self=include_self)
    return x.scatter_reduce(dim, indices, source, reduce, include_self=include_self) if found is NotImplemented else found


SCATTERS: dict[Any, Any] = {}
for _name, _rewrite in {
    "index_add": instead(_index_add),
    "index_fill": instead(_index_fill),
    "scatter_reduce": instead(_scatter_reduce),
    "index_reduce": instead(_index_reduce),
}.items():
    SCATTERS[getattr(torch, _name)] = SCATTERS[getattr(torch.Tensor, _name)] = _rewrite
    SCATTERS[getattr(torch.Tensor, f"{_name}_")] = in_place(_rewrite, getattr(torch, _name))


def _cut(rewrite: Rewrite | None) -> Rewrite:
    """The call, or its rewrite, with no more of the source than there are indices: onnxruntime wants both of one shape."""

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index, source = args[2:4] if len(args) > 3 else (None, None)
        if isinstance(source, torch.Tensor) and isinstance(index, torch.Tensor) and source.dim() and _is_larger(source, index):
            args = (*args[:3], source[tuple(slice(0, size) for size in index.shape)], *args[4:])
        return call(rewrite, func, args, kwargs)

    return called


def _is_larger(source: torch.Tensor, index: torch.Tensor) -> bool:
    """Whether the sizes, or what stands for them, differ."""
    with private.paused_capture():
        return [str(size) for size in source.shape] != [str(size) for size in index.shape]


for _name in ("scatter", "scatter_add", "scatter_reduce"):
    for _function in (getattr(torch, _name), getattr(torch.Tensor, _name), getattr(torch.Tensor, f"{_name}_")):
        SCATTERS[_function] = _cut(SCATTERS.get(_function))
