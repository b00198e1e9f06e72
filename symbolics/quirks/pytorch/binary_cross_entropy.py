"""Binary cross entropy where a probability is 0 or 1, in floating point."""

from __future__ import annotations

import torch
from torch.nn import functional

from symbolics import torch_private as private
from symbolics.quirks.pytorch.logarithms import log1p
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import in_float, instead, stopped

__all__ = ["BINARY_CROSS_ENTROPY", "QUIRK"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="binary_cross_entropy_with_logits is written as the logarithm of a sigmoid, which is infinite from |logit| = 17 on; the gradient of "
    "binary_cross_entropy is NaN where p is 0 or 1, and TorchScript has no translation of it",
)

_NONE, _MEAN = 0, 1
_SMALLEST_VARIANCE = 1e-12  # below which torch's backward takes p (1 - p) for this
_LOWEST_LOG = -100.0


def _with_logits(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    pos_weight: torch.Tensor | None = None,
    reduction: int = _NONE,
) -> torch.Tensor:
    """(1 - t) x + (1 + (pos_weight - 1) t) softplus(-x), as torch computes it."""
    minus_log_p = functional.softplus(-x)
    if pos_weight is not None:
        minus_log_p = minus_log_p * ((pos_weight - 1) * target + 1)
    return _reduced((1 - target) * x + minus_log_p, weight, reduction)


def _of_probabilities(p: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = _NONE) -> torch.Tensor:
    """Logarithms are -100 at least. The slope is (p - t) / (p (1 - p)), its divisor 1e-12 at least: at the edges a line has it. 1e-12 is 0 in float16."""
    at_edge = p * (1 - p) < _SMALLEST_VARIANCE
    slope = stopped((p - target) / _SMALLEST_VARIANCE)
    line = torch.where(at_edge, slope * (p - stopped(p)), torch.zeros_like(p))
    inner = torch.where(at_edge, stopped(p), p)
    log_p, log_q = torch.log(inner).clamp(min=_LOWEST_LOG), log1p(-inner).clamp(min=_LOWEST_LOG)
    each = (target - 1) * log_q - target * log_p + line
    return _reduced(each + _slope_of_target(p, target) if target.requires_grad else each, weight, reduction)


def _slope_of_target(p: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """0, whose slope by the target is infinite where p is 0 or 1: torch's backward has the logarithms there without their bound."""
    edge = (p == 0) | (p == 1)
    root = torch.sqrt(torch.where(edge, target - stopped(target), torch.ones_like(p)))
    return torch.where(edge, torch.where(p == 0, root, -root), torch.zeros_like(p))


def _reduced(each: torch.Tensor, weight: torch.Tensor | None, reduction: int) -> torch.Tensor:
    each = each if weight is None else each * weight
    return each if reduction == _NONE else each.mean() if reduction == _MEAN else each.sum()


BINARY_CROSS_ENTROPY = {
    torch.binary_cross_entropy_with_logits: instead(_with_logits),
    private.inner_function("binary_cross_entropy"): instead(in_float(_of_probabilities)),
}
