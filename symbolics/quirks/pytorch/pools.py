"""Average pools with a divisor of their own, pools of one image without a batch, and windows as long as an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.errors import ExportError
from symbolics.quirks.pytorch.lengths import number_of
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, call

__all__ = ["POOLS", "QUIRK"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="avg_pool2d and avg_pool3d drop divisor_override; TorchScript has no windows of a size of the trace (max_pool2d(x, [1, x.size(3)])), takes the channels of an input without a batch for its batch, "
    "and has no adaptive average whose size is no divisor; dynamo takes an open size for a multiple of the adaptive pool's",
)


def _each(value: int | Sequence[int] | None, n: int, otherwise: Sequence[int]) -> list[int]:
    if value is None or (not isinstance(value, int) and len(value) == 0):
        return list(otherwise)
    return [value] * n if isinstance(value, int) else list(value) * (n // len(value))


def _divided(
    n: int,
    pool: Any,
    x: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    """The sums of the windows over the divisor: the mean over windows that lie in a border of zeros, times their size."""
    if divisor_override is None:
        return pool(x, kernel_size, stride, padding, ceil_mode, count_include_pad)
    kernel = _each(kernel_size, n, ())
    steps, border = _each(stride, n, kernel), _each(padding, n, ())
    # With ceil_mode the last window may stand over the border by less than a step.
    around = [amount for step, pad in zip(reversed(steps), reversed(border)) for amount in (pad, pad + (step - 1 if ceil_mode else 0))]
    means = pool(functional.pad(x, around), kernel, steps)
    if ceil_mode:  # one that would start in the border is none
        sizes = pool(x, kernel_size, stride, padding, ceil_mode).shape[-n:]
        for axis, size in enumerate(sizes):
            means = means.narrow(axis - n, 0, size)
    size = 1
    for length in kernel:
        size *= length
    return means * (size / divisor_override)


def _average(n: int) -> Rewrite:
    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
        given = {**dict(zip(("input", *names), args)), **kwargs}
        x = given.pop("input")
        if given.get("divisor_override") is None:
            return func(*args, **kwargs)
        return _divided(n, func, x, **given)

    return called


def _adaptive(n: int) -> Rewrite:
    """A product with a matrix of shares for each axis: in TorchScript those whose size is no multiple of what is asked for, under dynamo
    those of open size, and all of an image in 3 dimensions, which it cannot average."""

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, asked = args if len(args) == 2 else (None, None)
        if x is None:
            return func(*args, **kwargs)
        rest = False
        for axis, size in zip(range(-n, 0), _each(asked, n, ())):
            length = x.shape[axis]
            if size is None or (size == 1 and n < 3) or (private.is_tracing() and number_of(length) % size == 0):
                rest = rest or size is not None
            elif private.is_tracing() or n == 3 or isinstance(length, torch.SymInt):
                x = (x.transpose(axis, -1) @ _shares(length, size, x)).transpose(axis, -1)
            else:
                rest = True
        return func(x, asked) if rest else x

    return called


def _shares(length: Any, size: int, like: torch.Tensor) -> torch.Tensor:
    """The share of each of so many values in each of ``size`` means, (length, size): window i is from floor(i length / size) to ceil((i + 1) length / size)."""
    values, means = torch.arange(length, device=like.device).unsqueeze(-1), torch.arange(size, device=like.device)
    low = torch.div(means * length, size, rounding_mode="floor")
    high = torch.div((means + 1) * length + (size - 1), size, rounding_mode="floor")
    return ((values >= low) & (values < high)).to(like.dtype) / (high - low).to(like.dtype)


def _largest(n: int) -> Rewrite:
    """torch.onnx.export(dynamo=True) takes an axis of open size for a multiple of what is asked for."""

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, asked = (*args, kwargs.get("output_size"))[:2]
        for axis, size in zip(range(-n, 0), _each(asked, n, ())):
            if size not in (None, 1) and isinstance(x.shape[axis], torch.SymInt):
                raise ExportError(
                    f"adaptive_max_pool{n}d to {size} of an axis of open size: torch.onnx.export(dynamo=True) takes it for a multiple of {size}: give the axis "
                    "a fixed size, or pool to 1"
                )
        return func(*args, **kwargs)

    return called


def _number(size: Any) -> Any:
    """A size of a trace as the example's number: `symbolics.capture.trace.sizes` says so of open axes."""
    return number_of(size) if size.dim() == 0 and size.dtype is torch.int64 else size


def _batched(n: int, inner: Rewrite | None = None) -> Rewrite:
    """In TorchScript, an input without a batch as a batch of one, and windows of numbers."""

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if private.is_tracing() and args:
            args, kwargs = (
                (args[0], *pytree.tree_map_only(torch.Tensor, _number, args[1:])),
                pytree.tree_map_only(torch.Tensor, _number, kwargs),
            )

        def pool(*args: Any) -> Any:
            return call(inner, func, args, kwargs)

        if not private.is_tracing() or not args or args[0].dim() != n + 1:
            return pool(*args)
        result = pool(args[0].unsqueeze(0), *args[1:])
        return tuple(value.squeeze(0) for value in result) if isinstance(result, tuple) else result.squeeze(0)

    return called


_INNER = private.inner_function
POOLS: dict[Any, Rewrite] = {
    torch.avg_pool1d: _batched(1), functional.avg_pool2d: _batched(2, _average(2)), functional.avg_pool3d: _batched(3, _average(3)),
    # What return_indices chooses between arrives whole.
    functional.max_pool1d: _batched(1), functional.max_pool2d: _batched(2), functional.max_pool3d: _batched(3),
    torch.adaptive_avg_pool1d: _batched(1, _adaptive(1)), _INNER("adaptive_avg_pool2d"): _batched(2, _adaptive(2)), _INNER("adaptive_avg_pool3d"): _batched(3, _adaptive(3)),
    functional.adaptive_max_pool1d: _batched(1, _largest(1)), functional.adaptive_max_pool2d: _batched(2, _largest(2)), functional.adaptive_max_pool3d: _batched(3, _largest(3)),
}  # fmt: skip
