"""Tensors made of numbers: of lists, ranges and unit matrices of small types, in torch.onnx.export(dynamo=False) with sizes that are open."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

from symbolics import torch_private as private
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead, instead_in_torchscript, stopped

__all__ = ["FACTORIES", "QUIRK"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="TorchScript writes Range and EyeLike of types that ONNX or onnxruntime has them not for, has no logspace, gives float64 for a linspace of an open number of steps, keeps the example's sizes in torch.tensor([x.shape[0]]), x.new_tensor([x.shape[0]]) and x.new(x.shape[0]), and makes arange(0.5, n, 1.7) of int32 "
    "of the numbers without their fractions; dynamo refuses a step below 1 there, and makes an open number of steps of linspace the example's; "
    "both take float32 for torch's default type of new tensors",
)

#: The types in which eager mode counts with the fractions and then leaves them out; in the others it leaves them out first. int64 is one since torch 2.15.
_COUNTED = [torch.uint8, torch.int8, torch.int16, torch.int32]
if len(torch.arange(0, 4, 1.5, dtype=torch.int64)) == 3:
    _COUNTED.append(torch.int64)


def _is_float(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, float)


def _whole(value: Any) -> Any:
    return value.to(torch.int64) if isinstance(value, torch.Tensor) else int(value)


def _arange(*numbers: Any, dtype: torch.dtype | None = None, **how: Any) -> Any:
    """Of whole numbers that are made of fractions, and of types that Range has not."""
    if private.is_tracing() and any(isinstance(value, bool) for value in numbers):
        return torch.arange(*map(_whole, numbers), dtype=dtype, **how)
    start, end, step = (0, *numbers, 1) if len(numbers) == 1 else (*numbers, 1)[:3]
    open_ = any(isinstance(value, torch.Tensor) for value in (start, end, step))
    if (
        dtype in _COUNTED
        and any(map(_is_float, (start, end, step)))
        and (open_ or all(type(v) in (int, float) for v in (start, end, step)))
    ):
        length = (end - start) / step
        count: Any = torch.ceil(length).to(torch.int64) if isinstance(length, torch.Tensor) else math.ceil(length)
        return (torch.arange(count, **how) * _whole(step) + _whole(start)).to(dtype)
    if not open_ or not private.is_tracing() or dtype in (None, torch.int64, torch.int32, torch.int16, torch.float32, torch.float64):
        return NotImplemented
    return torch.arange(start, end, step, dtype=torch.float32 if dtype.is_floating_point else torch.int64, **how).to(dtype)


def _eye(*sizes: Any, dtype: torch.dtype | None = None, **how: Any) -> Any:
    return torch.eye(*sizes, **how).to(dtype) if dtype in (torch.bool, torch.uint8, torch.int8, torch.int16) else NotImplemented


def _logspace(start: Any, end: Any, steps: Any, base: float = 10.0, *, dtype: torch.dtype | None = None, **how: Any) -> Any:
    if isinstance(start, torch.Tensor) and type(steps) is int and steps == 1:  # TorchScript divides by the number of steps less one
        exponents = start.to(torch.float64).reshape(1)
    else:
        exponents = torch.linspace(start, end, steps, dtype=torch.float64, **how)
    return torch.pow(float(base), exponents).to(dtype or torch.get_default_dtype())


def _linspace(start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, **how: Any) -> Any:
    """From both ends to the middle, in the type asked for, as PyTorch computes it."""
    dtype = dtype or torch.get_default_dtype()
    open_ = any(isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat)) for value in (start, end, steps))
    if not open_ or not dtype.is_floating_point or how.get("requires_grad"):
        return NotImplemented

    def one(value: Any) -> torch.Tensor:  # with an axis: TorchScript takes a scalar for a Python number, of float32
        return value.to(dtype).reshape(1) if isinstance(value, torch.Tensor) else torch.full((1,), value, dtype=dtype, **how)

    start, end = one(start), one(end)
    places = torch.arange(steps, **how)
    step = (end - start) / one(steps - 1).clamp(min=1)
    half = (steps + 1) // 2  # the middle of an odd number is that of both
    return torch.where(places < half, start + step * places.to(dtype), end - step * (steps - 1 - places).to(dtype))


def _dtype_of(leaf: Any) -> torch.dtype:
    return (
        leaf.dtype
        if isinstance(leaf, torch.Tensor)
        else torch.get_default_dtype()
        if isinstance(leaf, float)
        else torch.bool
        if isinstance(leaf, bool)
        else torch.int64
    )


def _tensor(data: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False, **how: Any) -> Any:
    """Of lists with tensors in them, as the sizes of a trace are: TorchScript keeps the values of the example."""
    leaves = pytree.tree_leaves(data)
    simple = all(isinstance(leaf, (int, float)) or (isinstance(leaf, torch.Tensor) and not leaf.dim()) for leaf in leaves)
    if not isinstance(data, (list, tuple)) or not simple or not any(isinstance(leaf, torch.Tensor) for leaf in leaves) or requires_grad:
        return NotImplemented
    kind = dtype or functools.reduce(torch.promote_types, map(_dtype_of, leaves))

    def made(part: Any) -> torch.Tensor:
        if isinstance(part, (list, tuple)):
            return torch.stack([made(each) for each in part])
        if not isinstance(part, torch.Tensor):
            return torch.full((), part, dtype=kind, **how)
        return (stopped(part.detach()) if part.is_floating_point() else part).to(kind)

    return made(data)


def _as_tensor(data: Any, **how: Any) -> Any:
    """Of lists with open sizes in them, which torch.export makes numbers of here, and not in torch.tensor."""
    if private.is_tracing():
        return _tensor(data, **how)
    open_ = isinstance(data, (list, tuple)) and any(isinstance(leaf, torch.SymInt) for leaf in pytree.tree_leaves(data))
    return torch.tensor(data, **how) if open_ else NotImplemented


def _new_tensor(x: torch.Tensor, data: Any, *, dtype: torch.dtype | None = None, **how: Any) -> Any:
    return _tensor(data, dtype=dtype or x.dtype, **{"device": x.device, **how})


def _new(x: torch.Tensor, *sizes: Any, **how: Any) -> Any:
    """The older name of `new_empty`, and for a list of `new_tensor`."""
    if how or not private.is_tracing() or not sizes:
        return NotImplemented
    if len(sizes) == 1 and type(sizes[0]) is list:
        return _new_tensor(x, sizes[0])
    if len(sizes) == 1 and isinstance(sizes[0], torch.Size):
        return x.new_empty(sizes[0])
    whole = all(type(size) is int or (isinstance(size, torch.Tensor) and not size.dim() and size.dtype is torch.int64) for size in sizes)
    return x.new_empty(sizes) if whole else NotImplemented


def _of_default_type(factory: Any, inner: Rewrite | None = None) -> Rewrite:
    """Say the type that new tensors have by default, where it is not float32, which both exporters take for it."""

    def formula(*args: Any, dtype: torch.dtype | None = None, **how: Any) -> Any:
        usual = torch.get_default_dtype()
        if dtype is not None or usual is torch.float32 or not _makes_floats(factory, args, how):
            return NotImplemented
        return factory(*args, dtype=usual, **how)

    return instead(formula, inner)


def _makes_floats(factory: Any, args: tuple[Any, ...], how: dict[str, Any]) -> bool:
    """Whether a factory gives floats where no type is asked for: two of them do so only for floats among their numbers."""
    if factory is torch.full:
        return isinstance(how.get("fill_value", args[1] if len(args) > 1 else None), (float, torch.SymFloat))
    numbers = (*args, *(how.get(name) for name in ("start", "end", "step")))
    return factory is not torch.arange or any(isinstance(number, (float, torch.SymFloat)) for number in numbers)


FACTORIES: dict[Any, Rewrite] = {
    torch.as_tensor: instead(_as_tensor),
    torch.tensor: instead_in_torchscript(_tensor),
    torch.Tensor.new_tensor: instead_in_torchscript(_new_tensor),
    torch.Tensor.new: instead_in_torchscript(_new),
    torch.arange: instead(_arange, _of_default_type(torch.arange)),
    torch.eye: instead_in_torchscript(_eye, _of_default_type(torch.eye)),
    torch.linspace: instead(_linspace, _of_default_type(torch.linspace)),
    torch.logspace: instead_in_torchscript(_logspace, _of_default_type(torch.logspace)),
    **{factory: _of_default_type(factory) for factory in (torch.zeros, torch.ones, torch.full, torch.empty, torch.rand, torch.randn)},
}
