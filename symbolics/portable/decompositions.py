"""ATen's operators in operators that torch.onnx translates: backwards of what forwards call, and what it does not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from symbolics.node.dtypes import HALVES

__all__ = ["DECOMPOSITIONS"]

aten = torch.ops.aten
_Tensors = tuple[torch.Tensor | None, ...]


def _convolution_backward(
    g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias_sizes: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int, mask: Sequence[bool],
) -> _Tensors:  # fmt: skip
    """Gradients of input, weight and bias.

    That of the input is the transposed convolution (and that of a transposed one is the plain one). That of the weight is a convolution of
    the input with the gradient, batch and channels exchanged, stride and dilation exchanged; one for each group.
    """
    axes = range(2, x.dim())
    of_x = of_w = None
    if mask[0] and transposed:
        of_x = aten.convolution.default(g, w, None, stride, padding, dilation, False, [0] * len(axes), groups)
    elif mask[0]:
        of_x = _transposed(g, w, x.shape[2:], stride, padding, dilation, groups)
    if mask[1]:
        outer, inner = (g, x) if transposed else (x, g)  # the one that is read by windows, the one that has one element a window
        parts = []
        for a, b in zip(outer.chunk(groups, 1), inner.chunk(groups, 1), strict=True):
            part = aten.convolution.default(
                a.transpose(0, 1), b.transpose(0, 1), None, dilation, padding, stride, False, [0] * len(axes), 1
            ).transpose(0, 1)
            for axis in axes:  # what the last windows left over
                part = part.narrow(axis, 0, w.shape[axis])
            parts.append(part)
        of_w = torch.cat(parts, 0)
    return of_x, of_w, g.sum([0, *axes]) if mask[2] else None


def _transposed(
    g: torch.Tensor,
    w: torch.Tensor,
    sizes: Sequence[Any],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """The transposed convolution that gives these sizes, of those that a strided one takes for equal.

    ONNX has numbers alone for how much to add to the smallest. Of open sizes, all that one can be is computed, and some of it taken.
    """
    axes = range(len(sizes))
    kernel = w.shape[2:]
    least = [(g.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel[i] - 1) + 1 for i in axes]
    rest = [size - smallest for size, smallest in zip(sizes, least, strict=True)]
    if all(isinstance(number, int) for number in rest):
        return aten.convolution.default(g, w, None, stride, padding, dilation, True, rest, groups)
    nothing = [0] * len(sizes)
    whole = aten.convolution.default(g, w, None, stride, nothing, dilation, True, nothing, groups)
    behind = [max(stride[i] - 1 - padding[i], 0) for i in axes]  # where no window came to
    if any(behind):
        whole = torch.nn.functional.pad(whole, [amount for each in reversed(behind) for amount in (0, each)])
    for i in axes:
        whole = whole.narrow(2 + i, padding[i], sizes[i])
    return whole


def _max_pool2d_backward(
    g: torch.Tensor, x: torch.Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, indices: torch.Tensor
) -> torch.Tensor:
    """Each gradient to the place that its maximum came from; places are counted within a channel."""
    flat = torch.zeros([*x.shape[:-2], x.shape[-2] * x.shape[-1]], dtype=g.dtype, device=g.device)
    return flat.scatter_add(-1, indices.flatten(-2), g.flatten(-2)).reshape(x.shape)


def _avg_pool2d_backward(
    g: torch.Tensor, x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool,
    count_include_pad: bool, divisor: int | None,
) -> torch.Tensor:  # fmt: skip
    """The transposed convolution with a window of equal weights, where all windows count alike."""
    if x.dim() == 3:
        found = _avg_pool2d_backward(g[None], x[None], kernel, stride, padding, ceil_mode, count_include_pad, divisor)
        return found if found is NotImplemented else found[0]
    if ceil_mode or (any(padding) and not count_include_pad and divisor is None):
        return NotImplemented
    kernel = list(kernel) * (3 - len(kernel))
    stride = list(stride or kernel) * (3 - len(stride or kernel))
    padding = list(padding) * (3 - len(padding))
    channels = x.shape[1]
    window = torch.full((channels, 1, *kernel), 1 / (divisor or kernel[0] * kernel[1]), dtype=g.dtype, device=g.device)
    return _transposed(g, window, x.shape[2:], stride, padding, [1, 1], channels)


def _frexp(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mantissa in [0.5, 1) and exponent, exactly: products with powers of two do not round.

    The power is applied in two halves: the exponents of the smallest and largest numbers are out of its range.
    """
    wide = x.double()
    size = wide.abs()
    plain = (size > 0) & (size < float("inf"))
    size = torch.where(plain, size, 1.0)
    exponent = size.log2().floor() + 1  # one off, at most
    half = (exponent / 2).floor()
    mantissa = size * torch.exp2(-half) * torch.exp2(half - exponent)
    above, below = mantissa >= 1, mantissa < 0.5
    mantissa = torch.where(above, mantissa / 2, torch.where(below, mantissa * 2, mantissa))
    exponent = torch.where(above, exponent + 1, torch.where(below, exponent - 1, exponent))
    mantissa = torch.where(plain, torch.where(wide < 0, -mantissa, mantissa), wide)
    return mantissa.to(x.dtype), torch.where(plain, exponent, 0.0).to(torch.int32)


def _diagonal_scatter(x: torch.Tensor, values: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """x with other values on a diagonal. torch's own decomposition writes into a view, which a trace without changes in place loses."""
    axes = [dim1 % x.dim(), dim2 % x.dim()]
    last = x.movedim(axes, [-2, -1])
    rows, columns = (torch.arange(last.shape[axis], device=x.device) for axis in (-2, -1))
    on_it = columns - rows.unsqueeze(-1) == offset
    spread = torch.nn.functional.pad(values, [max(-offset, 0), last.shape[-2] - values.shape[-1] - max(-offset, 0)])  # one for each row
    return torch.where(on_it, spread.unsqueeze(-1), last).movedim([-2, -1], axes)


def _diagonal_backward(g: torch.Tensor, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> torch.Tensor:
    return _diagonal_scatter(torch.zeros(list(sizes), dtype=g.dtype, device=g.device), g, offset, dim1, dim2)


def _batch_norm_in_training(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor | None, var: torch.Tensor | None,
    training: bool, momentum: float, eps: float,
) -> _Tensors:  # fmt: skip
    """By the statistics of the batch: (y, their mean, their 1/std, new running mean, new running variance); the last two None without old ones.

    All of it is a function of x: as a node of ONNX (BatchNormalization in training mode) the statistics would be none to a second derivative.
    """
    if not training:
        return NotImplemented
    axes, kind = [0, *range(2, x.dim())], torch.float32 if x.dtype in HALVES else x.dtype
    of_channels = [1, x.shape[1], *[1] * (x.dim() - 2)]
    values = x.to(kind)
    centre = values.mean(axes, keepdim=True)
    centred = values - centre
    spread = (centred * centred).mean(axes, keepdim=True)
    rstd = (spread + eps).rsqrt()
    y = centred * rstd
    if weight is not None:
        y = y * weight.to(kind).reshape(of_channels)
    if bias is not None:
        y = y + bias.to(kind).reshape(of_channels)
    centre, spread, rstd = (value.reshape(x.shape[1:2]) for value in (centre, spread, rstd))
    given = next((t.dtype for t in (weight, mean) if t is not None), x.dtype)
    new_mean = new_var = None
    if mean is not None and var is not None:
        count = x.numel() // x.shape[1]
        new_mean = (mean.to(kind) * (1 - momentum) + centre * momentum).to(mean.dtype)
        new_var = (var.to(kind) * (1 - momentum) + spread * (count / (count - 1)) * momentum).to(var.dtype)  # the unbiased one
    return y.to(x.dtype), centre.to(given), rstd.to(given), new_mean, new_var


def _batch_norm_of_the_batch(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, training: bool, momentum: float, eps: float
) -> _Tensors:
    return _batch_norm_in_training(x, weight, bias, None, None, True, momentum, eps)[:3]


def _batch_norm_with_update(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    momentum: float,
    eps: float,
) -> _Tensors:
    y, centre, rstd, *new = _batch_norm_in_training(x, weight, bias, mean, var, True, momentum, eps)
    return y, centre, rstd, torch.zeros([0], dtype=torch.uint8), *new  # what cuDNN alone reserves


#: operator -> what it is made of; beside torch's own table.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._batch_norm_with_update_functional.default: _batch_norm_with_update,
    aten._native_batch_norm_legit.no_stats: _batch_norm_of_the_batch,
    aten._native_batch_norm_legit_functional.default: _batch_norm_in_training,
    aten.convolution_backward.default: _convolution_backward,
    aten.avg_pool2d_backward.default: _avg_pool2d_backward,
    aten.diagonal_backward.default: _diagonal_backward,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.frexp.Tensor: _frexp,
    aten.max_pool2d_with_indices_backward.default: _max_pool2d_backward,
}
