"""Calls whose backward in PyTorch is not the derivative of what torch.onnx.export writes for them.

Each function here takes the result of such a call, its arguments, and gives the same values by operators whose derivative is what
PyTorch computes. The source is the documentation of each operator and torch's derivatives.yaml.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from symbolics.quirks.pytorch.variance import deviation
from symbolics.quirks.quirk import Quirk
from symbolics.users import warn

__all__ = ["OWN_BACKWARD", "QUIRK"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="some calls are written by operators whose derivative is not the call's own backward: it is infinite, or goes where eager's does not",
)


def _embedding(
    result: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """The rows of ``padding_idx`` learn nothing. (torch.nn.functional passes 0 or more, or -1 for none.)"""
    if scale_grad_by_freq:
        warn("embedding(scale_grad_by_freq=True): the gradients of the file are not divided by how often a row is read: pass False.")
    if padding_idx < 0:
        return result
    return torch.where((indices == padding_idx).unsqueeze(-1), torch.ops.pythonop.stop_gradient(result.detach()), result)


def _extremum(result: Any, x: torch.Tensor, dim: Any = None, keepdim: bool = False) -> Any:
    """Along one dimension: of equal extrema, the one that ``indices`` names has all of the gradient. ReduceMax shares it evenly."""
    if not isinstance(dim, int) or x.dim() == 0:  # over everything it is shared, and with a tensor it is torch.maximum
        return result
    _, indices = result
    dim %= x.dim()  # onnx.reference's GatherElements counts no axis from the end
    picked = x.gather(dim, indices if keepdim else indices.unsqueeze(dim))
    return type(result)((picked if keepdim else picked.squeeze(dim), indices))


def _std(result: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Nothing flows where the deviation is 0; the square root alone has an infinite slope there."""
    return deviation(x, *args, **kwargs)


def _log_sigmoid(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Finite where the sigmoid is 0 in floating point."""
    return -functional.softplus(-x)


def _rewriting(rewrite: Callable[..., Any]) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """Call the function, and rewrite its result where a gradient will flow."""

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        return rewrite(result, *args, **kwargs) if first.requires_grad else result

    return called


_EXTREMUM, _STD = _rewriting(_extremum), _rewriting(_std)
OWN_BACKWARD: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.embedding: _rewriting(_embedding),
    torch.max: _EXTREMUM, torch.Tensor.max: _EXTREMUM, torch.min: _EXTREMUM, torch.Tensor.min: _EXTREMUM,
    torch.std: _STD, torch.Tensor.std: _STD,
    functional.logsigmoid: _rewriting(_log_sigmoid),
}  # fmt: skip
