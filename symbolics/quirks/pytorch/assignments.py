"""Assignments by index tensors, ``x[rows, :, columns] = value``, for torch.onnx.export(dynamo=False)."""

from __future__ import annotations

from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, write

__all__ = ["ASSIGNMENTS", "QUIRK"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript refuses x[rows, :, columns] = value, and what it writes for indices of several shapes behind or before a slice, for indices behind "
    "an ellipsis and for a row in the place of a mask fails when it runs",
)

_WHOLE = slice(None)


def _places(x: torch.Tensor, parts: tuple[Any, ...]) -> list[tuple[int, torch.Tensor]] | None:
    """The axes that index tensors stand for, each with its whole numbers; None where there is anything else beside them than whole axes."""
    if not all(isinstance(part, torch.Tensor) or part is Ellipsis or (isinstance(part, slice) and part == _WHOLE) for part in parts):
        return None
    taken = sum(part.dim() if isinstance(part, torch.Tensor) and part.dtype is torch.bool else 1 for part in parts if part is not Ellipsis)
    axis, found = 0, list[tuple[int, torch.Tensor]]()
    for part in parts:
        if part is Ellipsis:
            axis += x.dim() - taken
        elif not isinstance(part, torch.Tensor):
            axis += 1
        elif part.dtype is torch.bool:
            for column in part.nonzero().unbind(1):
                found.append((axis, column))
                axis += 1
        elif part.dtype in (torch.int32, torch.int64) and part.dim():
            found.append((axis, part))
            axis += 1
        else:
            return None
    return found or None


def _is_written(x: torch.Tensor, parts: tuple[Any, ...], value: Any) -> bool:
    """Whether torch writes the assignment itself: indices before all else, and a mask that a number or values of their own replace."""
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return False
    if len(parts) == 1 and parts[0].dtype is torch.bool:
        return parts[0].dim() == x.dim() or not isinstance(value, torch.Tensor) or value.dim() == 0
    return all(part.dtype is not torch.bool for part in parts)


def _assign(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, key, value = args
    if not private.is_tracing() or isinstance(key, list):  # which may stand for a tuple
        return func(*args, **kwargs)
    parts = key if isinstance(key, tuple) else (key,)
    parts = tuple(torch.tensor(part) if isinstance(part, list) and all(type(each) is int for each in part) else part for part in parts)
    if _is_written(x, parts, value) or (places := _places(x, parts)) is None:
        return func(*args, **kwargs)
    axes = [axis for axis, _ in places]
    indices = torch.broadcast_tensors(*(index for _, index in places))
    rest, rank = [axis for axis in range(x.dim()) if axis not in axes], indices[0].dim()
    together = axes == list(range(axes[0], axes[0] + len(axes)))
    front = axes[0] if together else 0  # where the indexed axes stand in what is assigned
    sizes = [x.shape[axis] for axis in rest]
    shape = [*sizes[:front], *indices[0].shape, *sizes[front:]]
    value = torch.as_tensor(value, dtype=x.dtype)
    value = value.reshape(value.shape[max(value.dim() - len(shape), 0) :]).expand(shape)  # axes of size 1 too many are none
    value = value.movedim(tuple(range(front, front + rank)), tuple(range(rank)))
    order = [*axes, *rest]
    write(x, x.permute(order).index_put(tuple(indices), value).permute([order.index(axis) for axis in range(x.dim())]))
    return None


ASSIGNMENTS: dict[Any, Rewrite] = {torch.Tensor.__setitem__: _assign}
