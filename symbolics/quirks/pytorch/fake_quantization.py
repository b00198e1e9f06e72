"""Fake quantization: levels as torch rounds them, of any number of bits, with scales that learn, and the gradient that torch gives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead, stopped

__all__ = ["FAKE_QUANTIZATION", "QUIRK", "exact_in_training", "fake"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="fake_quantize is written for 8 bits alone, and by QuantizeLinear, which divides by the scale where torch multiplies by its reciprocal: at ties, "
    "levels and masks differ; scales that learn have no translation",
)

#: (quant_min, quant_max) that torch.onnx writes as QuantizeLinear and DequantizeLinear, which integer kernels are made for.
_WRITTEN = {(0, 255), (-128, 127), (0, 127)}
_thread = threading.local()


@contextlib.contextmanager
def exact_in_training(model: torch.nn.Module) -> Iterator[None]:
    """What is exported in eval mode keeps the operators that integer kernels know; what is to be trained has torch's own rounding."""
    before = getattr(_thread, "training", False)
    _thread.training = model.training
    try:
        yield
    finally:
        _thread.training = before


def _is_written(quant_min: int, quant_max: int) -> bool:
    return (quant_min, quant_max) in _WRITTEN and not getattr(_thread, "training", False)


def _along(value: Any, x: torch.Tensor, axis: int | None) -> Any:
    """A scale or zero point, shaped to broadcast with x."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.reshape([-1 if i == axis % x.dim() else 1 for i in range(x.dim())]) if axis is not None else value.reshape(())


def _reciprocal(scale: Any) -> Any:
    """1 / scale in float32, whatever the type of x."""
    return 1.0 / scale.float() if isinstance(scale, torch.Tensor) else float(np.float32(1.0) / np.float32(scale))


def _levels(
    x: torch.Tensor, scale: Any, zero: Any, quant_min: int, quant_max: int, fused: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The levels less their zero point, cut to their range, and which of them were outside of it; torch computes in float32 what is smaller.

    Args:
        x, scale, zero, quant_min, quant_max: As torch has them.
        fused: Whether the zero point is added before anything is rounded, as one instruction of a processor does it.
    """
    if fused:
        level = torch.round((x.double() * _reciprocal(scale).double() + zero).float())
    else:
        level = torch.round((x if x.dtype == torch.float64 else x.float()) * _reciprocal(scale)) + zero
    return torch.clamp(level, quant_min, quant_max) - zero, torch.logical_or(level < quant_min, level > quant_max)


def _value(levels: torch.Tensor, scale: Any) -> torch.Tensor:
    """In float32, of whatever type x is."""
    return levels.float() * (scale.float() if isinstance(scale, torch.Tensor) else float(np.float32(scale)))


def _slope(x: torch.Tensor) -> torch.Tensor:
    """0, with the gradient of x."""
    return x - stopped(x)


def fake(x: torch.Tensor, scale: Any, zero: Any, axis: int | None, quant_min: int, quant_max: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantised values, with the gradient of x where it is in range; and where that is."""
    with torch.no_grad():
        scale = _along(scale, x, axis)
        zero = zero.float() if isinstance(zero, torch.Tensor) else float(zero)
        levels, outside = _levels(x, scale, _along(zero, x, axis), quant_min, quant_max)
        value = _value(levels, scale).to(x.dtype)
    return stopped(value) + torch.where(outside, torch.zeros_like(x), _slope(x)), torch.logical_not(outside)


def _per_tensor(input: torch.Tensor, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> Any:
    return NotImplemented if _is_written(quant_min, quant_max) else fake(input, scale, zero_point, None, quant_min, quant_max)[0]


def _per_channel(input: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int, quant_min: int, quant_max: int) -> Any:
    return NotImplemented if _is_written(quant_min, quant_max) else fake(input, scale, zero_point, axis, quant_min, quant_max)[0]


def _per_tensor_with_mask(self: torch.Tensor, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> Any:
    return fake(self, scale, zero_point, None, quant_min, quant_max)


def _per_channel_with_mask(
    self: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int, quant_min: int, quant_max: int
) -> Any:
    return fake(self, scale, zero_point, axis, quant_min, quant_max)


def _per_tensor_if_enabled(
    input: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, fake_quant_enabled: torch.Tensor, quant_min: int, quant_max: int
) -> Any:
    value, inside = fake(input, scale, zero_point, None, quant_min, quant_max)
    enabled = (fake_quant_enabled != 0).reshape(())
    return torch.where(enabled, value, input), torch.logical_or(inside, torch.logical_not(enabled))


def _learning(
    x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, axis: int | None, quant_min: int, quant_max: int, grad_factor: float
) -> torch.Tensor:
    """Scale and zero point have gradients, too: what a level and a bound weigh, times ``grad_factor``."""
    s, z = _along(scale, x, axis), _along(zero, x, axis)
    with torch.no_grad():
        point = torch.clamp(torch.round(z), quant_min, quant_max)
        levels, outside = _levels(x, s, point, quant_min, quant_max)
        value = _value(levels, s).to(x.dtype)
        if axis is None:  # the one call that rounds otherwise on its way back
            levels, outside = _levels(x, s, point, quant_min, quant_max, fused=True)
        of_scale = torch.where(outside, levels, (_value(levels, s) - x) * _reciprocal(s)) * grad_factor
        of_zero = torch.where(outside, -s.float() * grad_factor, torch.zeros_like(levels))
    result = stopped(value) + torch.where(outside, torch.zeros_like(x), _slope(x))
    for parameter, weight in ((s, of_scale), (z, of_zero)):
        if parameter.requires_grad:
            result = result + _slope(parameter) * stopped(weight).to(x.dtype)
    return result


def _learning_per_tensor(
    input: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> torch.Tensor:
    return _learning(input, scale, zero_point, None, quant_min, quant_max, grad_factor)


def _learning_per_channel(
    input: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> torch.Tensor:
    return _learning(input, scale, zero_point, axis, quant_min, quant_max, grad_factor)


_aten = torch.ops.aten
_learned, _learned_channels, _switched = private.private_quantizers()
_FORMULAS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (_per_tensor, (torch.fake_quantize_per_tensor_affine, _aten.fake_quantize_per_tensor_affine)),
    (_per_channel, (torch.fake_quantize_per_channel_affine, _aten.fake_quantize_per_channel_affine)),
    (_per_tensor_with_mask, (_aten.fake_quantize_per_tensor_affine_cachemask,)),
    (_per_channel_with_mask, (_aten.fake_quantize_per_channel_affine_cachemask,)),
    (_per_tensor_if_enabled, (_switched,)),
    (_learning_per_tensor, (_learned,)),
    (_learning_per_channel, (_learned_channels,)),
]
FAKE_QUANTIZATION: dict[Any, Rewrite] = {}
for _formula, _functions in _FORMULAS:
    for _function in _functions:
        FAKE_QUANTIZATION[_function] = instead(_formula)
        for _overload in _function.overloads() if hasattr(_function, "overloads") else ():
            FAKE_QUANTIZATION[getattr(_function, _overload)] = FAKE_QUANTIZATION[_function]


def _fake_kernel(self: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(self), torch.empty_like(self, dtype=torch.bool)


# What becomes QuantizeLinear calls them. Where all sizes are known, torch runs them on zeros to know what they give; with an open size it stops there.
for _operator in private.quantizers_with_masks():
    private.give_fake_kernel(_operator, _fake_kernel)
