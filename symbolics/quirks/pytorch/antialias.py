"""Resizes with ``antialias=True`` (F.interpolate, torchvision's resize): two products with matrices of weights, as torch's kernels compute them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.node.dtypes import HALVES
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead

__all__ = ["ANTIALIAS", "QUIRK"]

QUIRK = Quirk(
    upstream="torch, onnxruntime",
    seen="2.13, 1.32",
    wrong="dynamo's Resize of an antialiased resize drops scale_factor and takes align_corners' coordinates, which torch's kernel does not have; "
    "TorchScript has none",
)


def _linear(x: torch.Tensor) -> torch.Tensor:
    return (1 - x).clamp(min=0)


def _cubic(x: torch.Tensor) -> torch.Tensor:
    """The convolution of Keys (1981) with a = -0.5."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def _scale(size: Any, out: Any, align_corners: bool, factor: float | None, dtype: torch.dtype) -> Any:
    """How many places of the input one of the output takes."""
    size, out = (value.to(dtype) if isinstance(value, torch.Tensor) else value for value in (size, out))  # in a trace
    if align_corners:
        return (size - 1) / (out - 1) if not isinstance(out, int) or out > 1 else 0.0
    return size / out if factor is None else 1 / factor


def _weights(
    like: torch.Tensor, size: Any, out: Any, scale: Any, reach: int, kernel: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The share of each place of the input in each of the output, a matrix (out, size).

    Args:
        like: Of the type and on the device that it gets.
        size, out: The lengths of the axis before and behind.
        scale: As `_scale` has it.
        reach: How far the kernel goes to each side.
        kernel: It, of distances.
    """
    how: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    step = torch.ones(1, **how) * scale
    wide = step.clamp(min=1.0)
    centers = (torch.arange(out, **how) + 0.5) * step
    first = (centers - reach * wide + 0.5).floor().clamp(min=0.0).unsqueeze(1)
    end = (centers + reach * wide + 0.5).floor().unsqueeze(1)
    places = torch.arange(size, **how).unsqueeze(0)
    weights = kernel(((places - centers.unsqueeze(1) + 0.5) / wide).abs()) * ((places >= first) & (places < end)).to(like.dtype)
    total = weights.sum(1, keepdim=True)
    return weights / torch.where(total == 0, torch.ones_like(total), total)


def _resized(reach: int, kernel: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def resized(x: torch.Tensor, output_size: Any, align_corners: bool, *scales: Any, **named: Any) -> Any:
        scales = scales or tuple(named.values())
        factors = [None, None] if not scales or scales[0] is None else list(scales[0] if isinstance(scales[0], (list, tuple)) else scales)
        if not x.is_floating_point() or x.dim() != 4:
            return NotImplemented
        sizes = list(x.shape[2:])
        outs = [_times(size, factor) for size, factor in zip(sizes, factors)] if output_size is None else list(output_size)
        wide = x.float() if x.dtype in HALVES else x
        rows, columns = (
            _weights(wide, size, out, _scale(size, out, align_corners, factor, wide.dtype), reach, kernel)
            for size, out, factor in zip(sizes, outs, factors)
        )
        return (rows @ (wide @ columns.T)).to(x.dtype)

    return resized


def _times(size: Any, factor: Any) -> Any:
    """The length behind, where a factor is given."""
    return (size * factor).floor().to(torch.int64) if isinstance(size, torch.Tensor) else math.floor(size * factor)


def _spellings(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name)
    return [private.inner_function(name), packet, *(getattr(packet, overload) for overload in ("default", "vec"))]


ANTIALIAS: dict[Any, Rewrite] = {
    function: instead(_resized(*how))
    for name, how in {"_upsample_bilinear2d_aa": (1, _linear), "_upsample_bicubic2d_aa": (2, _cubic)}.items()
    for function in _spellings(name)
}
