"""Resizes to the nearest element, whose places eager mode computes in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead

__all__ = ["NEAREST", "QUIRK"]

QUIRK = Quirk(
    upstream="torch, onnxruntime",
    seen="2.13, 1.32",
    wrong="interpolate(mode='nearest-exact') of open sizes divides by the scale, in float64, where eager mode multiplies by its inverse in float32, and onnxruntime's "
    "Resize divides, too: another element where a place is a whole number; TorchScript has no nearest-exact",
)


def _resized(x: torch.Tensor, sizes: Sequence[Any] | None, scales: Sequence[float] | None, offset: float) -> torch.Tensor:
    for axis in range(2, x.dim()):
        length: Any = x.shape[axis]
        if scales is None:
            new = sizes[axis - 2]  # type: ignore[index]
            inverse = _floats(length) / _floats(new)
        else:
            scale = scales[axis - 2]
            new = _times(length, scale)
            inverse = torch.full((), 1 / scale, dtype=torch.float32, device=x.device)
        places = ((torch.arange(new, device=x.device).float() + offset) * inverse).to(torch.int64)
        x = x.index_select(axis, torch.minimum(places, _whole(length) - 1))
    return x


def _whole(size: Any) -> torch.Tensor:
    return size if isinstance(size, torch.Tensor) else torch.scalar_tensor(size, dtype=torch.int64)


def _floats(size: Any) -> torch.Tensor:
    return _whole(size).float()


def _times(length: Any, scale: float) -> Any:
    """The new size, as torch rounds it."""
    if isinstance(length, torch.Tensor):
        return (length.double() * scale).floor().to(torch.int64)
    return torch.sym_int(length * scale)


def _exact(x: torch.Tensor, sizes: Any, scales: Any = None, *more: Any) -> torch.Tensor:
    given = scales is None or isinstance(scales, (list, tuple))
    return _resized(x, sizes, scales, 0.5) if given and not more else NotImplemented


def _floor(x: torch.Tensor, sizes: Any, scales: Any = None, *more: Any) -> torch.Tensor:
    """Whole factors, and powers of two, stay a Resize, which is exact for them."""
    if more or not isinstance(scales, (list, tuple)) or all(float(scale).is_integer() or math.frexp(scale)[0] == 0.5 for scale in scales):
        return NotImplemented
    return _resized(x, None, scales, 0.0)


NEAREST: dict[Any, Rewrite] = {
    private.inner_function(f"{name}{n}d"): instead(formula)
    for name, formula in (("_upsample_nearest_exact", _exact), ("upsample_nearest", _floor))
    for n in (1, 2, 3)
}
