"""Losses that one of the exporters, or both, have no translation of."""

from __future__ import annotations

import math
from typing import Any

import torch

from symbolics import torch_private as private
from symbolics.quirks.pytorch.distances import DISTANCES
from symbolics.quirks.pytorch.logarithms import log1p
from symbolics.quirks.quirk import Quirk
from symbolics.quirks.rewriting import Rewrite, instead, instead_in_torchscript

__all__ = ["LOSSES", "QUIRK"]

QUIRK = Quirk(
    upstream="torch and onnxscript's torchlib",
    seen="2.13, 0.7.2",
    wrong="TorchScript has no label_smoothing, no probabilities as targets of cross_entropy, and none of huber_loss, l1_loss, smooth_l1_loss, "
    "margin, poisson and triplet losses; multi_margin_loss without a batch has another shape under dynamo, multilabel_margin_loss another value; soft_margin_loss has no digits of a small loss; "
    "dynamo gives cross_entropy and nll_loss of each label no dimensions where sizes are open; the second derivative of huber_loss and smooth_l1_loss at 0 is 0",
)

_NONE, _MEAN, _SUM = 0, 1, 2  # what the functions of C++ take for reduction=; without it they take the first, whatever their schema says
Tensor = torch.Tensor


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    return loss.mean() if reduction == _MEAN else loss.sum() if reduction == _SUM else loss


def _positive(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


def _l1(x: Tensor, target: Tensor, reduction: int = _NONE) -> Tensor:
    return _reduced((x - target).abs(), reduction)


def _huber(x: Tensor, target: Tensor, reduction: int = _NONE, delta: float = 1.0) -> Tensor:
    """A square of the difference itself: that of its absolute value has no second derivative at 0."""
    z = x - target
    size = z.abs()
    return _reduced(torch.where(size < delta, 0.5 * z * z, delta * (size - 0.5 * delta)), reduction)


def _smooth_l1(x: Tensor, target: Tensor, reduction: int = _NONE, beta: float = 1.0) -> Tensor:
    return _l1(x, target, reduction) if beta == 0 else _reduced(_huber(x, target, 0, beta) / beta, reduction)


def _soft_margin(x: Tensor, target: Tensor, reduction: int = _NONE) -> Tensor:
    return _reduced(log1p((-x * target).exp()), reduction)


def _margin_ranking(a: Tensor, b: Tensor, target: Tensor, margin: float = 0.0, reduction: int = _NONE) -> Tensor:
    return _reduced((-target * (a - b) + margin).clamp_min(0), reduction)


def _hinge_embedding(x: Tensor, target: Tensor, margin: float = 1.0, reduction: int = _NONE) -> Tensor:
    zero = torch.zeros_like(x)
    return _reduced(torch.where(target != 1, (margin - x).clamp_min(0), zero) + torch.where(target != -1, x, zero), reduction)


def _triplet_margin(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2.0, eps: float = 1e-6, swap: bool = False, reduction: int = _NONE
) -> Tensor:  # fmt: skip
    def distance(a: Tensor, b: Tensor) -> Any:
        return DISTANCES[torch.pairwise_distance](torch.pairwise_distance, (a, b, p, eps), {})

    far = distance(anchor, negative)
    far = torch.minimum(far, distance(positive, negative)) if swap else far
    return _reduced((margin + distance(anchor, positive) - far).clamp_min(0), reduction)


def _multi_margin(
    x: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, weight: Tensor | None = None, reduction: int = _NONE
) -> Tensor:
    x = x if x.dim() else x.reshape(1)
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1, 1)
    z = _positive(margin - rows.gather(1, labels) + rows)
    z = z * z if p == 2 else z
    z = z if weight is None else z * weight[labels]
    return _reduced(z.scatter(1, labels, 0.0).sum(1).reshape(target.shape) / x.shape[-1], reduction)


def _multilabel_margin(x: Tensor, target: Tensor, reduction: int = _NONE) -> Tensor:
    """Each label in front of the first -1 against each class that is none of them."""
    x = x if x.dim() else x.reshape(1)
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1, x.shape[-1])
    given = (labels < 0).to(torch.int64).cumsum(1) == 0
    labels = labels.clamp_min(0)
    classes = torch.arange(x.shape[-1])
    theirs = ((labels.unsqueeze(2) == classes) & given.unsqueeze(2)).to(torch.int64).sum(1) > 0
    z = _positive(1 - rows.gather(1, labels).unsqueeze(2) + rows.unsqueeze(1))
    loss = torch.where(given.unsqueeze(2) & ~theirs.unsqueeze(1), z, torch.zeros_like(z)).sum((1, 2)) / x.shape[-1]
    return _reduced(loss if x.dim() > 1 else loss.reshape(()), reduction)


def _poisson_nll(x: Tensor, target: Tensor, log_input: bool, full: bool, eps: float, reduction: int) -> Tensor:
    loss = x.exp() - target * x if log_input else x - target * (x + eps).log()
    if full:
        large = torch.where(target > 1, target, torch.full_like(target, 2.0))
        stirling = large * large.log() - large + 0.5 * (2 * math.pi * large).log()
        loss = loss + torch.where(target > 1, stirling, torch.zeros_like(stirling))
    return _reduced(loss, reduction)


def _of_labels(logs: Tensor, target: Tensor, weight: Tensor | None, ignore_index: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What each label adds to a loss, its weight, and whether it counts; of one that does not, the first two are 0."""
    axis = 0 if logs.dim() == 1 else 1
    kept = target != ignore_index
    labels = torch.where(kept, target, torch.zeros_like(target))
    # torch refuses a label below 0: the index that stands for it, no runtime has.
    labels = torch.where(labels < 0, torch.full_like(labels, logs.shape[axis]), labels)
    each = kept.to(logs.dtype) if weight is None else weight[labels] * kept.to(logs.dtype)
    return -logs.gather(axis, labels.unsqueeze(axis)).squeeze(axis) * each, each, kept


def _is_of_each(x: Tensor, target: Tensor, reduction: int) -> bool:
    """Whether torch.export captures a loss of each label, at open sizes."""
    open_ = any(isinstance(size, torch.SymInt) for size in (*x.shape, *target.shape))
    return reduction == _NONE and open_ and not target.is_floating_point()


def _nll(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _NONE, ignore_index: Any = -100) -> Tensor:
    """Of each label, where sizes are open: torch's decompositions then give the result no dimensions."""
    if not _is_of_each(x, target, reduction):
        return NotImplemented
    loss, _, kept = _of_labels(x, target, weight, ignore_index)
    return torch.where(kept, loss, torch.zeros_like(loss))


def _cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _NONE, ignore_index: Any = -100, label_smoothing: float = 0.0
) -> Tensor:
    """With smoothed labels, or with probabilities as targets; the rest has a translation."""
    probable = target.is_floating_point()
    if not (probable or label_smoothing):
        if not _is_of_each(x, target, reduction):
            return NotImplemented
        return _nll(x.log_softmax(0 if x.dim() == 1 else 1), target, weight, reduction, ignore_index)
    if not private.is_tracing():
        return NotImplemented
    axis = 0 if x.dim() == 1 else 1
    classes = x.shape[axis]
    logs = x.log_softmax(axis)
    weights = None if weight is None else weight.reshape([-1 if i == axis else 1 for i in range(x.dim())])
    weighted = logs if weights is None else logs * weights
    if probable:
        target = target * (1 - label_smoothing) + label_smoothing / classes if label_smoothing else target
        loss = -(weighted * target).sum(axis)
        return loss.sum() / (loss.numel() if x.dim() > 1 else 1) if reduction == _MEAN else _reduced(loss, reduction)
    likely, each, kept = _of_labels(logs, target, weight, ignore_index)
    smooth = -weighted.sum(axis)
    loss = (1 - label_smoothing) * likely + smooth * (label_smoothing / classes)
    # Behind all that is added up: what is ignored has the gradient 0 also where all is, and the mean is 0 / 0.
    loss = torch.where(kept, loss, torch.zeros_like(loss))
    return loss.sum() / each.sum() if reduction == _MEAN else _reduced(loss, reduction)


LOSSES: dict[Any, Rewrite] = {
    private.inner_function("l1_loss"): instead_in_torchscript(_l1),
    private.inner_function("cross_entropy_loss"): instead(_cross_entropy),
    private.inner_function("nll_loss_nd"): instead(_nll),
    private.inner_function("huber_loss"): instead(_huber),
    private.inner_function("smooth_l1_loss"): instead(_smooth_l1),
    private.inner_function("soft_margin_loss"): instead(_soft_margin),
    private.inner_function("multi_margin_loss"): instead(_multi_margin),
    private.inner_function("multilabel_margin_loss"): instead(_multilabel_margin),
    torch.margin_ranking_loss: instead_in_torchscript(_margin_ranking),
    torch.hinge_embedding_loss: instead_in_torchscript(_hinge_embedding),
    torch.triplet_margin_loss: instead_in_torchscript(_triplet_margin),
    torch.poisson_nll_loss: instead_in_torchscript(_poisson_nll),
}
