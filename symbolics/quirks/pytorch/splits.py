"""Parts of an axis: splits, and in torch.onnx.export(dynamo=False) narrow, roll and unfold, at sizes that are open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.errors import ExportError
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead, instead_in_torchscript

__all__ = ["QUIRK", "SPLITS"]

QUIRK = Quirk(
    upstream="torch",
    seen="2.13",
    wrong="both exporters write the parts of tensor_split with the sizes of the example, or as a sequence of unknown length; TorchScript has no hsplit, "
    "vsplit and dsplit, its chunks of a shorter axis end in one of negative size, its narrow from a negative place is empty, its roll by more than the size or by an open number is wrong, its unfold takes no open size, and what reads a size of an unflattened tensor reads the example's; dynamo's chunk of an open size makes it a number, and its split is a sequence, "
    "of which onnxruntime has no gradient",
)


def _split(x: torch.Tensor, places: Any, dim: int = 0) -> Any:
    """Slices between the places."""
    if x.dim() == 0 or (type(places) is int and places < 1):
        return NotImplemented
    if isinstance(places, torch.Tensor):
        with private.paused_capture():
            places = places.tolist()
    if not isinstance(places, Sequence):  # so many parts, of which the first are longer by one
        size = x.shape[dim]
        return _split(x, [sum((size + places - 1 - earlier) // places for earlier in range(i)) for i in range(1, places)], dim)
    before = (slice(None),) * (dim % x.dim())
    return tuple(x[(*before, slice(start, end))] for start, end in zip([0, *places], [*places, None]))


def _narrow(x: torch.Tensor, dim: int, start: Any, length: Any) -> Any:
    return x.narrow(dim, x.shape[dim] + start, length) if type(start) is int and start < 0 else NotImplemented


def _roll(x: torch.Tensor, shifts: Any, dims: Any = ()) -> Any:
    shifts, dims = ([value] if isinstance(value, (int, torch.Tensor)) else list(value) for value in (shifts, dims))
    if x.numel() == 0 or x.dim() == 0 or len(shifts) != (len(dims) or 1):
        return NotImplemented
    if not dims:
        return _roll(x.reshape(-1), shifts, 0).reshape(x.shape)
    for shift, dim in zip(shifts, dims):
        before = (slice(None),) * (dim % x.dim())
        start = (-shift) % x.shape[dim]
        x = torch.cat([x[(*before, slice(start, None))], x[(*before, slice(0, start))]], dim)
    return x


def _unfold(x: torch.Tensor, dimension: int, size: int, step: int) -> Any:
    if x.dim() == 0:
        return NotImplemented
    dim = dimension % x.dim()
    starts = torch.arange((x.shape[dim] - size) // step + 1, device=x.device) * step
    places = starts.unsqueeze(-1) + torch.arange(size, device=x.device)
    return x[(slice(None),) * dim + (places,)].movedim(dim + 1, -1)


def _unflatten(x: torch.Tensor, dim: int, sizes: Any) -> Any:
    if type(dim) is not int or x.dim() == 0 or x.is_quantized:
        return NotImplemented
    dim %= x.dim()
    return x.reshape((*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))


def _tensor_split(x: torch.Tensor, places: Any, dim: int = 0) -> Any:
    """With dynamo=True only a size that is known is divided rightly: torch assumes of others that nothing is left over."""
    if private.is_tracing():
        return _split(x, places, dim)
    if type(places) is int and places > 1 and x.dim() and isinstance(x.shape[dim], torch.SymInt):
        raise ExportError(
            f"tensor_split into {places} parts of an axis of open size: torch.onnx.export(dynamo=True) takes it for a multiple of {places}: give the axis "
            "a fixed size, pass the places to tensor_split, or export with dynamo=False"
        )
    return NotImplemented


def _chunk(x: torch.Tensor, chunks: int, dim: int = 0) -> Any:
    """Slices, where an exporter's own parts are wrong: where an axis of open size has fewer parts than the example, the last are empty."""
    if type(chunks) is not int or chunks < 1 or x.dim() == 0:
        return NotImplemented
    size = x.shape[dim]
    if private.is_tracing():
        with private.paused_capture():
            example = int(x.shape[dim])
    elif isinstance(size, torch.SymInt) and size.node.has_hint():
        example = int(size.node.hint)
    else:
        return NotImplemented
    parts = -(-example // max(-(-example // chunks), 1))
    if example == 0 or (private.is_tracing() and parts == chunks):  # what TorchScript writes of that is right
        return NotImplemented
    length = (size + chunks - 1) // chunks
    before = (slice(None),) * (dim % x.dim())
    return tuple(x[(*before, slice(i * length, (i + 1) * length if i + 1 < parts else None))] for i in range(parts))


def _split_open(x: torch.Tensor, split_size_or_sections: Any, dim: int = 0) -> Any:
    """Slices, as many as the example has: the export warns of that."""
    size, length = split_size_or_sections, x.shape[dim] if x.dim() else 0
    if private.is_tracing() or type(size) is not int or size < 1 or not isinstance(length, torch.SymInt) or not length.node.has_hint():
        return NotImplemented
    return _split(x, range(size, max(int(length.node.hint), 1), size), dim)


_FORMULAS: dict[str, Callable[..., Any]] = {
    "tensor_split": _tensor_split,
    "hsplit": lambda x, places: _split(x, places, min(1, x.dim() - 1)),
    "vsplit": lambda x, places: _split(x, places, 0),
    "dsplit": lambda x, places: _split(x, places, 2),
}


_PLACES: dict[str, Callable[..., Any]] = {"narrow": _narrow, "roll": _roll}
SPLITS: dict[Any, Rewrite] = {
    **{
        getattr(place, name): (instead if name == "tensor_split" else instead_in_torchscript)(formula)
        for name, formula in {**_FORMULAS, **_PLACES}.items()
        for place in (torch, torch.Tensor)
    },
    torch.chunk: instead(_chunk),
    torch.Tensor.chunk: instead(_chunk),
    torch.split: instead(_split_open),
    torch.Tensor.split: instead(_split_open),
    torch.Tensor.unfold: instead_in_torchscript(_unfold),
    torch.unflatten: instead_in_torchscript(_unflatten),
    torch.Tensor.unflatten: instead_in_torchscript(_unflatten),
}
