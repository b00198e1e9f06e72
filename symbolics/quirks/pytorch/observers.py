"""Fake quantization that observes: the range of x moves along with it, scale and zero point follow, and x is rounded by them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from symbolics.errors import ExportError
from symbolics.quirks.pytorch.fake_quantization import fake
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead, write

__all__ = ["OBSERVERS", "QUIRK", "is_settled", "settled"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="fused_moving_avg_obs_fake_quant, which torch.ao's FusedMovingAvgObsFakeQuantize calls, has no translation",
)

_thread = threading.local()
_SMALL = 6.1e-5  # torch has no scale below it


def _parameters(
    low: torch.Tensor, high: torch.Tensor, quant_min: int, quant_max: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of ranges, in double, but for what torch rounds to float32 on its way."""
    span = quant_max - quant_min
    both = torch.logical_and(low < 0, high > 0)
    if symmetric:
        below, above = -(span // 2 + 1), span // 2
        widest = torch.maximum((low / below).abs(), (high / above).abs())
        low, high = torch.where(both, (widest.double() * below).float(), low), torch.where(both, (widest.double() * above).float(), high)
    low, high = torch.clamp(low, max=0.0).double(), torch.clamp(high, min=0.0).double()
    scale = (high - low) / span
    scale = torch.where(torch.isinf(1.0 / scale.float()), torch.full_like(scale, 0.1), scale)
    small = scale < _SMALL
    grown = scale / _SMALL
    low = torch.where(small, torch.where(low == 0, low, torch.where(high == 0, torch.full_like(low, -_SMALL * span), low / grown)), low)
    high = torch.where(small, torch.where(low == 0, torch.full_like(high, _SMALL * span), high / grown), high)
    scale = torch.where(small, torch.full_like(scale, _SMALL), scale)
    from_low, from_high = quant_min - low / scale, quant_max - high / scale
    error_low, error_high = abs(quant_min) - (low / scale).abs(), abs(quant_max) - (high / scale).abs()
    point = torch.where(error_low < error_high, from_low, from_high)
    if symmetric:
        point = torch.where(both, torch.full_like(point, (quant_min + quant_max) / 2), point)
    return scale.float(), torch.round(torch.clamp(point, quant_min, quant_max))


def _observing(
    input: torch.Tensor,
    observer_on: torch.Tensor,
    fake_quant_on: torch.Tensor,
    running_min: torch.Tensor,
    running_max: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
) -> torch.Tensor:
    axis = ch_axis if per_row_fake_quant else None
    if (quantizing := getattr(_thread, "settled", None)) is not None:
        return fake(input, scale, zero_point, axis, quant_min, quant_max)[0] if quantizing else input
    if not running_min.numel():
        raise ExportError(
            "an observer of channels has seen no input: its first one gives its statistics their size, and state of a file has one.\n"
            "  way out: run the model once before the export"
        )
    with torch.no_grad():
        x = input.detach().float()
        others = [0] if axis is None else [i for i in range(x.dim()) if i != axis % x.dim()]
        x = x.reshape(-1) if axis is None else x
        observes, quantizes = (observer_on != 0).reshape(()), (fake_quant_on != 0).reshape(())
        ends: list[torch.Tensor] = []
        for running, seen in ((running_min, x.amin(others)), (running_max, x.amax(others))):
            seen = seen.reshape(running.shape)
            moved = torch.where(torch.isinf(running), seen, running + averaging_const * (seen - running))
            ends.append(write(running, torch.where(observes, moved, running)))
        low, high = (end.reshape(-1) for end in ends)  # TorchScript computes in float32 what is double and without dimensions
        new_scale, new_point = _parameters(low, high, quant_min, quant_max, symmetric_quant)
        s = write(scale, torch.where(quantizes, new_scale.reshape(scale.shape), scale))
        point = new_point.reshape(zero_point.shape).to(zero_point.dtype)
        z = write(zero_point, torch.where(quantizes, point, zero_point))
    value = fake(input, s, z, axis, quant_min, quant_max)[0]
    return torch.where(quantizes, value, input)


def is_settled(module: Any) -> bool:
    """Whether a module that no longer observes has the scale that its statistics give: each forward would compute it again."""
    observer = module.activation_post_process
    if not observer.min_val.numel() or observer.min_val.is_meta:
        return False
    scale, point = _parameters(
        observer.min_val.reshape(-1), observer.max_val.reshape(-1), observer.quant_min, observer.quant_max, module.is_symmetric_quant
    )
    return torch.equal(scale, module.scale.reshape(-1)) and torch.equal(point.to(module.zero_point.dtype), module.zero_point.reshape(-1))


def settled(forward: Callable[..., Any], quantizing: bool) -> Callable[..., Any]:
    """The forward of such a module: it rounds, or does not, and changes nothing."""

    def called(*args: Any, **kwargs: Any) -> Any:
        _thread.settled = quantizing
        try:
            return forward(*args, **kwargs)
        finally:
            _thread.settled = None

    return called


OBSERVERS: dict[Any, Rewrite] = {torch.fused_moving_avg_obs_fake_quant: instead(_observing)}
