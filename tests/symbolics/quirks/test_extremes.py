"""What torch.onnx writes wrongly, at the extremes where it shows: outputs and gradients of both exporters' files against eager."""

from __future__ import annotations

import copy
import math
import sys

import pytest
import torch
from torch import tensor
from torch.nn import functional as F

import exporter
from tests.processes import python
from tests.support import Calls

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

INF = math.inf
LOGITS = tensor([[-300.0, -90, -18, -3, 0, 3, 18, 90, 300]])
TARGETS = tensor([[0.0, 1, 0, 1, 0.5, 1, 1, 0, 1]])
ROWS = torch.tensor([[0.0, 0, 0], [1.5, -2, 0.25], [0.5, 0.5, -1], [3, 0, -0.75]])  # the first has no direction
OTHERS = torch.tensor([[0.3, 1, -2], [1.5, -2, 0.25], [-1, 0.5, 2], [0, 4, 0.125]])
TABLE = torch.arange(18.0).reshape(6, 3).sin()
BOUNDS = tensor([-4.0, -3, -1, -0.5, 0, 0.5, 1, 3, 6, 7])
IMAGE = torch.arange(50.0).reshape(1, 2, 5, 5).cos()
BAG, STARTS, STARTS_OF_AN_EMPTY_ONE = tensor([1, 2, 0, 5, 0]), tensor([0, 3]), tensor([0, 3, 3])
THREE = torch.arange(6.0).reshape(3, 2)
TWICE = tensor([1, 1, 0])


def _in_place(name, *args, **kwargs):
    def call(x, *others):
        y = x.clone()
        getattr(y, name)(*args, *others, **kwargs)
        return y

    return call


def _joined(results):
    """The sum of what is of floats, where there are several."""
    return results if isinstance(results, torch.Tensor) else sum(value for value in results if value.is_floating_point())


def _put(x, u):
    return x.index_put((TWICE,), u, accumulate=True)


def _put_in_place(x, u):
    y = x.clone()
    y.index_put_((TWICE, tensor([0, 0, 1])), u[:, 0], accumulate=True)
    return y


PROJECTED = torch.nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True, proj_size=2).requires_grad_(False)

BOTH = {
    "squeeze of what is not 1": (lambda x: (x.squeeze(1), x[:, None].squeeze(1).squeeze(-2)), ROWS),
    "lstm with projections": (lambda x: PROJECTED(x)[0], ROWS[None]),
    "sort, stable, with ties": (lambda x: x.sort(stable=True, descending=True, dim=0)[0], ROWS),
    "einsum that stretches": (lambda a, b: (torch.einsum("ij,ij->ij", a, b).sin(), torch.einsum("ij,kj,ik", a, b, b).cos()), torch.rand(1, 3), torch.rand(2, 1)),
    "deepcopy": (lambda x: x * copy.deepcopy(x.detach()) + [copy.deepcopy([x.data])[0].exp_(), x][0], ROWS),
    # losses
    "bce with logits": (F.binary_cross_entropy_with_logits, LOGITS, TARGETS),
    "bce with logits, weighted": (
        lambda x, t: F.binary_cross_entropy_with_logits(x, t, torch.full((9,), 2.0), pos_weight=torch.full((9,), 3.0), reduction="none"),
        LOGITS, TARGETS,
    ),
    "bce with logits, summed": (lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction="sum"), LOGITS, TARGETS),
    "bce": (lambda p: F.binary_cross_entropy(p, tensor([0.0, 1, 1, 0, 0.5, 1, 0])), tensor([0.0, 1, 0, 1, 0.5, 0.3, 1 - 1e-6])),
    # pools
    "avg_pool2d, divisor": (lambda x: F.avg_pool2d(x, 2, divisor_override=3), IMAGE),
    "avg_pool2d, divisor, a window over the border": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=7), IMAGE),
    "avg_pool2d, divisor, no batch": (lambda x: F.avg_pool2d(x, (2, 3), (1, 2), divisor_override=3), IMAGE[0]),
    "avg_pool3d, divisor": (lambda x: F.avg_pool3d(x, 2, divisor_override=3), torch.arange(54.0).reshape(1, 2, 3, 3, 3)),
    # angles
    "atan2": (
        torch.atan2,
        tensor([0.0, -0.0, 0, -0.0, 1, -1, 0, 1, -1, 2, 3, -3, 1e30]),
        tensor([-1.0, -1, 1, 1, 0, 0, 0, 1, 1, -1, -4, -4, 1e30]),
    ),
    "arctan2 in place": (lambda y, x: y.clone().arctan2_(x), tensor([0.0, 1]), tensor([-1.0, 0])),
    # what TorchScript has no translation of
    **{name: (getattr(torch, name), tensor([-0.9, -1e-4, 0.0, 1e-3, 0.5])) for name in ("atanh", "asinh", "sinh", "cosh", "exp2", "frac")},
    "acosh": (torch.acosh, tensor([1.5, 2.0, 1e6])),
    "addcdiv": (lambda x, a, b: torch.addcdiv(x, a, b, value=0.5), THREE, THREE + 1, THREE + 2),
    "addbmm": (lambda x, a, b: torch.addbmm(x, a, b, beta=2.0, alpha=0.5), torch.ones(2, 2), torch.arange(12.0).reshape(2, 2, 3), torch.ones(2, 3, 2)),
    "addmv, beta=0": (lambda x, a, b: torch.addmv(x, a, b, beta=0), tensor([float("nan")] * 4), ROWS, tensor([1.0, 2, 3])),
    **{f"diag of a vector, {k}": (lambda x, k=k: torch.diag(x, k), tensor([1.0, INF, 3])) for k in (-1, 0, 2)},
    **{f"diag of a matrix, {k}": (lambda x, k=k: torch.diag(x, k), ROWS) for k in (-1, 0, 1)},
    "diag_embed": (lambda x: torch.diag_embed(x, 1), ROWS),
    "diagonal_scatter": (lambda x, y: torch.diagonal_scatter(x, y[:2], -1) + x.mT.diagonal_scatter(y, 1, 1, 0).mT, torch.arange(12.0).reshape(3, 4), torch.ones(3)),
    "fill": (lambda x, y: torch.fill(x, y) * torch.fill(x, 2), ROWS, torch.tensor(3.0)),
    "block_diag": (torch.block_diag, THREE, tensor(2.0), tensor([1.0, 2])),
    "trace": (torch.trace, ROWS),
    "isin": (lambda x: x * torch.isin(x, tensor([1.0, 3.0])), ROWS),
    "isclose": (lambda x: x.nan_to_num() * torch.isclose(x, x + 1e-9, equal_nan=True), tensor([1.0, float("nan"), INF])),
    "nanmean": (lambda x: torch.nanmean(x, 0), tensor([[1.0, 2.0], [float("nan"), 4.0]])),
    "nanmean of all": (torch.nanmean, tensor([[1.0, 2.0], [float("nan"), 4.0]])),
    "rms_norm": (lambda x, w: F.rms_norm(x, (3,), w), ROWS, tensor([1.0, 2.0, 0.5])),
    "bilinear": (F.bilinear, ROWS, OTHERS, torch.arange(18.0).reshape(2, 3, 3) / 9, tensor([1.0, -1.0])),
    # a scalar along an axis
    **{
        f"{name} of a scalar, {axis}": (lambda x, name=name, axis=axis: _joined(getattr(torch, name)(x * 1.0, dim=axis)), tensor(-1.5))
        for name in ("amax", "amin", "aminmax", "max", "min", "sum", "mean", "prod", "sort", "norm", "softmax", "logsumexp")
        for axis in (0, -1)
    },
    "places in a scalar": (lambda x: x * (x.argmax(0) + x.argmin(-1) + x.argsort(0)), tensor(-1.5)),
    "ends of a scalar, keepdim": (lambda x: _joined(torch.aminmax(x, dim=0, keepdim=True)), tensor(-1.5)),
    "a scalar in order": (lambda x: x.msort() + _joined(x.sort(descending=True)) + _joined(x.topk(1)) + x.flip([0]), tensor(-1.5)),
    "var of a scalar": (lambda x: x + torch.var(x, 0, correction=0) + torch.std(x, correction=0), tensor(-1.5)),
    "threshold": (lambda x: F.threshold(x, 0.5, -20.0), tensor([0.4, 0.5, 0.6, float("nan")])),
    # distances
    **{f"pairwise_distance, p={p}": (lambda a, b, p=p: F.pairwise_distance(a, b, p=p), ROWS, OTHERS) for p in (0.5, 1.0, 2.0, 3.0, INF)},
    "pairwise_distance of equals": (F.pairwise_distance, ROWS, ROWS.clone()),
    **{f"cdist, p={p}": (lambda a, b, p=p: torch.cdist(a, b, p=p), ROWS, OTHERS) for p in (0.0, 1.0, 1.5, 2.0, 3.0, INF)},
    **{f"cdist to itself, p={p}": (lambda a, p=p: torch.cdist(a, a, p=p), ROWS) for p in (0.0, 1.0, 2.0, 3.0, INF)},
    "cdist of batches": (torch.cdist, OTHERS.reshape(2, 2, 3), ROWS.reshape(2, 2, 3)),
    **{f"norm of rows, p={p}": (lambda x, p=p: x.norm(p=p, dim=1), ROWS) for p in (0.5, 1, 2, 3, INF)},
    "norm of zeros, p=3": (lambda x: x.norm(p=3), torch.zeros(3)),
    "norm of zeros, fro": (lambda x: x.norm(), torch.zeros(2, 3)),
    "matrix_norm of zeros": (torch.linalg.matrix_norm, torch.zeros(2, 3)),
    "linalg.norm, keepdim": (lambda x: torch.linalg.norm(x, keepdim=True), ROWS),
    "linalg.norm, axes, keepdim": (lambda x: torch.linalg.norm(x, dim=(0, 1), keepdim=True), ROWS),
    "normalize, p=3": (lambda x: F.normalize(x, p=3.0), ROWS),
    "cosine_similarity": (F.cosine_similarity, ROWS, OTHERS),
    "cosine_similarity of zeros": (lambda a: F.cosine_similarity(a, a * 2), ROWS),
    "cosine_embedding_loss": (lambda a, b: F.cosine_embedding_loss(a, b, tensor([1.0, -1, 1, -1])), ROWS, OTHERS),
    "dist of equals": (lambda a: torch.dist(a, a * 1), ROWS),
    # scatters
    **{
        f"{name}, a source larger than the index": (lambda x, name=name, more=more: getattr(x, name)(1, tensor([[0, 1], [2, 0]]), TABLE, *more), ROWS)
        for name, more in {"scatter": (), "scatter_add": (), "scatter_reduce": ("sum",)}.items()
    },
    "scatter_add_, a source larger than the index": (_in_place("scatter_add_", 0, tensor([[0], [3]]), TABLE), ROWS),
    "scatter_reduce prod": (lambda x, u: x.scatter_reduce(0, tensor([0, 0, 1, 2]), u, "prod"), tensor([0.0, 2, 3]), tensor([4.0, 0, 3, 0])),
    "scatter_reduce prod, zeros": (
        lambda x, u: x.scatter_reduce(0, tensor([0, 0, 1, 1]), u, "prod"), tensor([5.0, 2, 3]), tensor([0.0, 7, 0, 0]),
    ),
    **{
        f"scatter_reduce {how}, alone": (
            lambda x, u, how=how: x.scatter_reduce(0, tensor([0, 0, 1, 1]), u, how, include_self=False),
            tensor([5.0, 2, 3]), tensor([0.0, 7, 4, 1]),
        )
        for how in ("sum", "prod", "mean", "amax", "amin")
    },
    "scatter_reduce mean": (lambda x, u: x.scatter_reduce(0, tensor([0, 0, 1, 2]), u, "mean"), tensor([1.0, 2, 3]), tensor([1.0, 1, 3, 0])),
    "index_reduce prod": (lambda x, u: x.index_reduce(0, TWICE, u, "prod"), THREE + 1, THREE),
    "index_fill": (lambda x, v: x.index_fill(0, tensor([1, 1, 3]), v), ROWS, tensor(2.0)),
    "index_add": (lambda x, u: x.index_add(0, TWICE, u, alpha=2.0), torch.ones(3, 2), THREE),
    "index_add in place": (_in_place("index_add_", 0, TWICE), torch.ones(3, 2), THREE),
    "index_put": (_put, torch.ones(3, 2), THREE),
    "index_put in place": (_put_in_place, torch.ones(3, 2), THREE),
    # bounds
    **{f"{name} at its bounds": (getattr(F, name), BOUNDS) for name in ("relu6", "hardtanh", "hardswish", "hardsigmoid", "relu")},
    "relu6 in place": (lambda x: F.relu6(x * 1, inplace=True), BOUNDS),
    "hardtanh of hardtanh": (lambda x: F.relu6(F.hardtanh(x, -3.0, 3.0)), BOUNDS),
    "relu6 of clamp": (lambda x: F.relu6(x.clamp(0, 6)), BOUNDS),
    "clamp": (lambda x: x.clamp(-1, 6), BOUNDS),
    "clamp of an int and a float": (lambda x: torch.clamp(x, 0, 6.99) + x.clip(max=3, min=-0.5) + (x * 1).clamp_(-2.5, 1), BOUNDS),
    "clamp of ints, by an int and a float": (lambda x: torch.clamp(x.int(), 0, 2.5) * x, BOUNDS),
    "clamp_max": (lambda x: x.clamp(max=6), BOUNDS),
    "clamp_min": (lambda x: x.clamp_min(-1), BOUNDS),
    "clamp of relu": (lambda x: F.relu(x).clamp(max=6), BOUNDS),
    "relu of clamp": (lambda x: F.relu(x.clamp(-1, 6)), BOUNDS),
    "minimum of maximum": (lambda x: torch.minimum(torch.maximum(x, tensor(-1.0)), tensor(6.0)), BOUNDS),
    "clamp by tensors": (
        torch.clamp, tensor([-4.0, -3, -1, 0, 1, 3, 6, 7, 0]), tensor([-4.0, -3, -3, -3, 2, 2, 2, 2, 3]), tensor([-4.0, -2, -1, -3, 2, 3, 6, 6, 1]),
    ),
    "clamp_min by a tensor": (torch.clamp_min, tensor([-4.0, 1, 2]), tensor([-4.0, 2, 1])),
    "clip_ by a tensor": (lambda x, high: (x * 1).clip_(max=high), tensor([-4.0, 1, 2]), tensor([-4.0, 2, 1])),
    # logarithms
    "xlogy": (lambda x: torch.xlogy(x, tensor([0.0, 1, 2, 3])), tensor([0.0, 0, 1, 2])),
    "xlogy of y": (lambda y: torch.special.xlogy(tensor([0.0, 0, 1, 2]), y), tensor([1.0, 2, 3, 4])),
    "xlog1py": (lambda x: torch.special.xlog1py(x, tensor([-1.0, 1, 2, 3])), tensor([0.0, 0, 1, 2])),
    "logaddexp": (torch.logaddexp, tensor([1000.0, -1000, 0, 3, -200]), tensor([1000.0, 1000, 0, -3, -210])),
    "logaddexp2": (torch.logaddexp2, tensor([1000.0, -1000, 0]), tensor([1000.0, 1000, 0])),
    "log1p": (torch.log1p, tensor([1e-6, -1e-6, 1e-8, 0, 0.3, -0.3, -0.99, 2, 1e30])),
    "expm1": (torch.expm1, tensor([1e-6, -1e-6, 1e-8, 0, 0.3, -0.3, -100, 2, 80])),
    "xlog1py of little": (lambda x, y: torch.special.xlog1py(x, y) * 1e6, tensor([1.0, 2]), tensor([1e-6, -1e-7])),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), tensor([[-100.0, 100, -20, 20, 0], [20, -200, 3, -3, 7]])),
    "logit": (torch.logit, tensor([0.0, 0.3, 0.5, 1])),
    "logit of a clamped number": (lambda x: torch.logit(x, 0.25), tensor([0.0, 0.25, 0.3, 0.5, 0.75, 1])),
    "entr": (torch.special.entr, tensor([-2.0, 0, 1e-6, 0.3, 1, 5])),
    "log_ndtr": (torch.special.log_ndtr, tensor([-40.0, -20, -7, -5, -1, 0, 1, 5, 10])),
    # bags
    **{f"embedding_bag {how}, padding": (lambda w, how=how: F.embedding_bag(BAG, w, STARTS, mode=how, padding_idx=0), TABLE) for how in ("sum", "mean", "max")},
    **{f"embedding_bag {how}, empty": (lambda w, how=how: F.embedding_bag(BAG, w, STARTS_OF_AN_EMPTY_ONE, mode=how), TABLE) for how in ("sum", "mean", "max")},
    "embedding_bag max of equals": (lambda w: F.embedding_bag(tensor([[1, 2, 1]]), w, mode="max"), torch.ones(3, 2)),
    "embedding_bag, last offset": (lambda w: F.embedding_bag(BAG, w, tensor([0, 2, 5]), mode="mean", include_last_offset=True), TABLE),
    "embedding_bag, weights": (lambda w, s: F.embedding_bag(BAG, w, STARTS, mode="sum", per_sample_weights=s), TABLE, tensor([1.0, 0.5, 2, -1, 3])),
    # small numbers
    "epsilon of a divisor": (lambda x: x / (x.abs().sum(1, keepdim=True) + 1e-9), ROWS),
    "products with nearly one": (lambda x: ((x * 1.000009 - x) * 1e4, (x / 0.999991 - x) * 1e4), ROWS.double()),
    "numbers beside float64": (lambda x: (x * 0.1 + 1 / 3, x.clamp(0.1, 1 / 3), x + torch.full_like(x, 0.1), F.hardtanh(x, 0.1, 1 / 3)), ROWS.double()),
    "numbers in float64 that torch writes": (lambda x: (x.var(), x.norm(3)), torch.arange(1.0, 10).reshape(3, 3).double()),
    # others
    "addmm of nothing": (lambda x, a, b: torch.addmm(x, a, b, beta=2.0), torch.ones(2, 3), torch.zeros(2, 0), torch.zeros(0, 3)),
    "softplus, threshold": (lambda x: F.softplus(x, 2.0, 1.0), tensor([-1.0, 0, 0.4, 0.5, 0.6, 5, 50, 1000])),
    "softplus": (F.softplus, tensor([-1000.0, -1, 0, 19, 20, 20.5, 50, 1000])),
    **{f"{name}, correction=0.5": (lambda x, name=name: getattr(torch, name)(x, 1, correction=0.5), OTHERS) for name in ("var", "std", "var_mean", "std_mean")},
    "std of all, correction=1.5, keepdim": (lambda x: x.std(correction=1.5, keepdim=True), OTHERS),
    "tensor_split in parts": (lambda x: torch.tensor_split(x, 3, 1), IMAGE),
    "tensor_split at places": (lambda x: x.tensor_split((1, 3), dim=-1), IMAGE),
    "tensor_split at a tensor's places": (lambda x: torch.tensor_split(x, tensor([1, -1]), 2), IMAGE),
    "hsplit": (lambda x: torch.hsplit(x, 2), IMAGE),
    "hsplit of a vector": (lambda x: x.hsplit((1, 2)), ROWS[1]),
    "vsplit": (lambda x: x.vsplit(indices=(1, 3)), ROWS),
    "dsplit": (lambda x: torch.dsplit(x, (2,)), IMAGE[0]),
    "tile": (lambda x: x.tile(2), ROWS),
    "tile to more dimensions": (lambda x: torch.tile(x, (2, 1, 3)), ROWS),
    "tile of the last dimension": (lambda x: x.tile(2), ROWS.reshape(2, 2, 3)),
    "circular pad, less": (lambda x: F.pad(x, (-1, 2), mode="circular"), IMAGE[0]),
    "circular pad, less in one": (lambda x: F.pad(x, (2, -1, -1, 1), mode="circular"), IMAGE),
    "max_pool2d of equals": (lambda x: F.max_pool2d(x, 3, 2, 1), (IMAGE * 2).round()),
    **{f"adaptive_{kind}_pool{n}d to {size}, no batch": (
        lambda x, kind=kind, n=n, size=size: getattr(F, f"adaptive_{kind}_pool{n}d")(x, size), torch.arange(2.0 * 4**n).reshape(2, *[4] * n).sin(),
    ) for kind in ("avg", "max") for n in (1, 2, 3) for size in (1, 2)},
    "gaussian_nll_loss": (lambda x, v: F.gaussian_nll_loss(x, torch.zeros(3), v), torch.ones(3), tensor([1e-8, 0.5, 2])),
    "gaussian_nll_loss, full": (lambda x, v: F.gaussian_nll_loss(x, x * 2, v, full=True, reduction="sum"), torch.ones(3, 2), torch.ones(3, 1)),
    "normal without deviation": (lambda x, s: torch.normal(x, s * 0) + x, tensor([1.0, 2]), tensor([1.0, 2])),
    "power of 0": (lambda x, y: x**y, tensor([0.0, 0, 0, 2]), tensor([2.0, 0, -1, 3])),
    **{f"adaptive_avg_pool{n}d to 3": (lambda x, n=n: getattr(F, f"adaptive_avg_pool{n}d")(x, 3), torch.arange(2.0 * 5**n).reshape(1, 2, *[5] * n).sin())
       for n in (1, 2, 3)},
    **{f"{name} of equals": (lambda x, name=name: getattr(torch, name)(x, 1), torch.ones(2, 3)) for name in ("std", "std_mean")},
    "erfcx": (torch.special.erfcx, tensor([-5.0, -0.5, 0, 0.5, 1, 9, 30, 1e4])),
    "sinc": (torch.sinc, tensor([0.0, 0.5, 1, -2.5])),
    "fmod by 0": (torch.fmod, tensor([5.0, -5, 0, 7.5, -7.5]), tensor([0.0, 0, 0, 2, 2])),
    # matrices
    "matrix_power of 0": (lambda x: torch.linalg.matrix_power(x, 0) * x, torch.ones(2, 3, 3)),
    # nothing
    **{f"{name} of nothing": (getattr(torch, name), torch.zeros(0, 3)) for name in ("sum", "mean", "var", "std")},
    "mean of nothing, rows": (lambda x: (x.mean(0), x.mean(-1, keepdim=True), x.sum(-1)), torch.zeros(0, 3)),
    **{f"{name} of nothing": (getattr(F, name), torch.zeros(0, 3), torch.zeros(0, 3))
       for name in ("mse_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "pairwise_distance")},
    "pairwise_distance of empty vectors": (F.pairwise_distance, torch.zeros(0), torch.zeros(0)),
    "cdist of nothing": (torch.cdist, torch.zeros(0, 5), torch.zeros(4, 5)),
    "det of nothing": (torch.linalg.det, torch.zeros(0, 2, 2)),
    **{f"{name} of a matrix of nothing": (getattr(torch, name), torch.zeros(0, 0)) for name in ("det", "logdet")},
    "images of nothing": (lambda x: F.interpolate(x, (3, 3), mode="bilinear"), torch.zeros(0, 2, 4, 4)),
    "adaptive_avg_pool2d of nothing": (lambda x: F.adaptive_avg_pool2d(x, (3, 5)), torch.zeros(0, 2, 4, 4)),
    **{f"product of {a} and {b}": (torch.matmul, torch.zeros(a), torch.zeros(b)) for a, b in [
        ((3, 4), (0, 4, 5)), ((0, 2, 3, 4), (2, 4, 5)), ((0, 3), (3,)), ((3,), (0, 3, 4)), ((2, 3, 0), (0, 4)), ((0,), (0,)), ((2, 0, 3), (3, 5)),
    ]},
    "product of what was turned": (lambda x, w: x.transpose(-1, -2) @ w, torch.zeros(0, 2, 3, 4), torch.zeros(3, 5)),
    "product of turned batches": (lambda x, w: (x.transpose(0, 1) * 0.5) @ w.permute(1, 2, 0), torch.zeros(0, 1, 2), torch.zeros(1, 1, 2)),
    # without dimensions
    "squeeze of a number": (lambda x: x.squeeze(0) * 2, tensor(0.5)),
    "pairwise_distance of numbers": (F.pairwise_distance, tensor(1.0), tensor(3.0)),
    "cosine_similarity of numbers": (lambda x, y: F.cosine_similarity(x, y, dim=0), tensor(1.0), tensor(3.0)),
    **{f"{name} of a number": (getattr(torch, name), tensor(0.5)) for name in ("log1p", "expm1")},
    "index_add to a number": (lambda x, u: x.index_add(0, tensor([0]), u), tensor(1.0), tensor(3.0)),
    "index_reduce to a number": (lambda x, u: x.index_reduce(0, tensor([0]), u, "mean"), tensor(1.0), tensor(3.0)),
    **{f"{name} of a number": (getattr(torch, name), tensor(0.5)) for name in ("log10", "log2", "nan_to_num", "sigmoid", "square", "neg")},
    "addcmul of numbers": (lambda x, y: torch.addcmul(x, y, y, value=2.0), tensor(0.5), tensor(0.25)),
    "cosine_similarity to a number": (lambda a, b: F.cosine_similarity(a, b, dim=0), ROWS[1], OTHERS[0]),
    **{f"{name} along no dimension": (lambda x, name=name: getattr(torch, name)(x, 0), tensor(0.5)) for name in ("softmax", "log_softmax", "cumsum", "logsumexp")},
}  # fmt: skip


LABELS, CLASSES = tensor([1, 0, 2, 2]), tensor([0.5, 1, 2])
HOW = ("mean", "sum", "none")
LOSSES = {
    **{f"cross_entropy, smooth, {how}": (lambda x, how=how: F.cross_entropy(x, LABELS, CLASSES, ignore_index=0, reduction=how, label_smoothing=0.2), ROWS) for how in HOW},
    "cross_entropy, smooth, no weights": (lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.2), ROWS),
    "cross_entropy, smooth, of images": (lambda x: F.cross_entropy(x, torch.ones(1, 5, 5, dtype=torch.long), label_smoothing=0.2), IMAGE),
    "cross_entropy, smooth, no batch": (lambda x: F.cross_entropy(x, tensor(1), label_smoothing=0.2), ROWS[1]),
    **{f"cross_entropy of probabilities, {how}": (lambda x, t, how=how: F.cross_entropy(x, t.softmax(1), CLASSES, reduction=how, label_smoothing=0.2), ROWS, OTHERS) for how in HOW},
    "cross_entropy of probabilities, no batch": (lambda x, t: F.cross_entropy(x, t.softmax(0)), ROWS[1], OTHERS[1]),
    **{f"huber, {how}": (lambda x, t, how=how: F.huber_loss(x, t, reduction=how, delta=0.75), ROWS, OTHERS) for how in HOW},
    **{f"smooth_l1, {beta}": (lambda x, t, beta=beta: F.smooth_l1_loss(x, t, beta=beta), ROWS, OTHERS) for beta in (0.0, 0.5, 1.0)},
    "l1": (F.l1_loss, ROWS, OTHERS),
    "soft_margin, far": (lambda x: F.soft_margin_loss(x, tensor([1.0, -1, 1, 1])) * 1e6, tensor([15.0, -16, 20, 40])),
    "soft_margin": (lambda x: F.soft_margin_loss(x, tensor([1.0, -1, 1])), ROWS),
    "margin_ranking": (lambda a, b: F.margin_ranking_loss(a, b, tensor([[1.0, -1, 1]]), margin=0.1), ROWS, OTHERS),
    "hinge_embedding": (lambda x: F.hinge_embedding_loss(x, tensor([1.0, -1, 1]), margin=0.6), ROWS),
    **{f"triplet_margin, swap={swap}": (
        lambda a, b, swap=swap: F.triplet_margin_loss(a, b, a.flip(0) * 0.5, swap=swap, p=1.0, reduction="none"), ROWS, OTHERS,
    ) for swap in (False, True)},
    "triplet_margin": (lambda a, b: F.triplet_margin_loss(a, b, b.flip(0)), ROWS, OTHERS),
    **{f"multi_margin, p={p}": (lambda x, p=p: F.multi_margin_loss(x, LABELS, p=p, margin=0.7, weight=CLASSES), ROWS) for p in (1, 2)},
    "multi_margin, no batch": (lambda x: F.multi_margin_loss(x, tensor(1), reduction="none"), ROWS[1]),
    **{f"multilabel_margin, {how}": (
        lambda x, how=how: F.multilabel_margin_loss(x, tensor([[1, 0, -1], [0, -1, 1], [2, 1, 0], [-1, 0, 1]]), reduction=how), ROWS,
    ) for how in HOW},
    "poisson_nll": (lambda x: F.poisson_nll_loss(x, OTHERS.abs() * 2, full=True), ROWS),
    "poisson_nll, no logarithm": (lambda x: F.poisson_nll_loss(x.abs() + 0.5, OTHERS.abs(), log_input=False), ROWS),
    "gaussian_nll": (lambda x, v: F.gaussian_nll_loss(x, x.detach() + 1, v.abs(), full=True), ROWS, OTHERS + 0.1),
    "gaussian_nll, a variance of 0": (lambda x, v: F.gaussian_nll_loss(x, x.detach(), v.abs(), eps=0.01), ROWS, ROWS[:, :1] * 0.01),
}  # fmt: skip

HALVES = {
    "index_put": (_put, torch.ones(3, 2), THREE),
    "index_add": (lambda x, u: x.index_add(0, TWICE, u), torch.ones(3, 2), THREE),
    "scatter_add": (lambda x, u: x.scatter_add(0, torch.tensor([[0, 1], [0, 1]]), u), THREE, torch.ones(2, 2)),
    "gather": (lambda x: x.gather(0, torch.tensor([[0, 1], [0, 1]])), THREE),
    "embedding": (lambda w: F.embedding(TWICE, w), THREE),
    "a mask": (lambda x: x[THREE > 2], THREE),
    "causal attention": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), IMAGE.sin()),
    "attention under a mask": (lambda q: F.scaled_dot_product_attention(q, q, q, THREE[:1].new_ones(5, 5, dtype=torch.bool).tril()), IMAGE.sin()),
    **{name: (lambda x, name=name: getattr(torch, name)(x, dim=0), OTHERS) for name in ("sum", "amax", "amin")},
    "prod": (lambda x: x.prod(1), OTHERS),
    "cumsum": (lambda x: x.cumsum(1) * x, OTHERS),
}  # fmt: skip


def alike(function, args, dynamo, tolerance=1e-5):
    """Outputs and gradients, each element of an output under a weight of its own."""
    module = exporter.load(exporter.export(Calls(function), tuple(args), dynamo=dynamo))
    found, expected = [], []
    for call, results in ((module, found), (function, expected)):
        inputs = [x.clone().requires_grad_() for x in args]
        outputs = call(*inputs)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        weights = [torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape) for y in outputs]
        results += outputs
        results += torch.autograd.grad(outputs, inputs, weights, allow_unused=True, materialize_grads=True)
    for one, two in zip(found, expected, strict=True):
        assert one.shape == two.shape
        assert one.dtype == two.dtype
        exact = 1e-10 if one.dtype is torch.float64 else tolerance
        torch.testing.assert_close(one, two, rtol=exact * 10, atol=exact, equal_nan=True)


DICE = torch.randint(6, (300,), generator=torch.Generator().manual_seed(0)).float()

#: What has no gradient.
FLAT = {
    "any": (lambda x: (x.any(), x.any(0), x.any((0, 1), keepdim=True)), tensor([[0.0, 0.3, 0.0], [0.0, 0.0, -0.1]])),
    "any of nothing": (lambda x: (x.any(), x.any(0), x.any(1)), torch.zeros(0, 3)),
    "all": (lambda x: (x.all(), x.all(1), (x != 0).all(0)), tensor([[0.3, -0.1], [0.0, 1.0]])),
    "all of nothing": (lambda x: (x.all(), x.all(0)), torch.zeros(0, 3)),
    "any of a number": (torch.any, tensor(0.3)),
    "signbit of a number": (torch.signbit, tensor(-0.5)),
    "signbit": (torch.signbit, tensor([-0.5, -0.0, 0.0, 2.0])),
    **{f"unique along {dim}": (lambda x, dim=dim: torch.unique(x, sorted=False, dim=dim), tensor([[3.0, 1.0], [1.0, 2.0], [3.0, 1.0]])) for dim in (0, 1)},
    "sort, stable": (lambda x: (*x.sort(stable=True), *torch.sort(x, dim=-1, descending=True, stable=True)), DICE),
    "argsort, stable": (lambda x: (x.argsort(stable=True), torch.argsort(x.long(), dim=-1, descending=True, stable=True)), DICE),
    "msort": (lambda x: (x.reshape(20, 15).msort(), torch.msort(x)), DICE),
    "argwhere of a number": (torch.argwhere, tensor(2.0)),
    "nonzero of no number": (torch.nonzero, tensor(0.0)),
    "shifts of negative numbers": (lambda x: x >> 1, tensor([-7, -1, 0, 7])),
    "trunc": (torch.trunc, tensor([-2.5, -0.5, 0, 2.5, 1e20, INF, -INF])),
    "div, trunc": (lambda x: torch.div(x, tensor([0.0, 0, 2, 2, 2]), rounding_mode="trunc"), tensor([1.0, -1, -7, 7, 1e20])),
    "floor_divide": (lambda x: (x // tensor([0.0, 0, 2, 2]), torch.floor_divide(x, 3.0)), tensor([1.0, -1, -7, 7])),
    "floor_divide of integers": (lambda x: x // 2, tensor([-7, -1, 0, 7])),
}  # fmt: skip


@pytest.mark.parametrize("case", FLAT)
def test_what_has_no_gradient_equals_eager(case, dynamo):
    function, x = FLAT[case]
    found, expected = exporter.load(exporter.export(Calls(function), (x,), dynamo=dynamo))(x), function(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


NOTHING = {
    "group_norm": (lambda x: F.group_norm(x, 2), torch.zeros(0, 4, 3)),
    "flatten": (lambda x: x.flatten(1), torch.zeros(0, 4, 3)),
    "view": (lambda x: x.view(-1, 2), torch.zeros(0, 4)),
    "unfold": (lambda x: F.unfold(x, 2, padding=1), torch.zeros(0, 2, 4, 4)),
}


@pytest.mark.parametrize("case", NOTHING)
def test_shapes_of_nothing(case):
    """In a process of its own: torch's exporter ends it."""
    done = python("-W", "ignore", "-m", "tests.symbolics.quirks.test_extremes", case)
    assert done.returncode == 0, done.stderr[-1000:]


def test_a_computed_shape_of_nothing_is_refused():
    script = (
        "import torch, exporter\n"
        "try: exporter.export(torch.nn.MultiheadAttention(4, 2), [torch.zeros(0, 4)] * 3, dynamo=False)\n"
        "except exporter.ExportError as error: print('refused', error)"
    )
    assert "refused" in python("-W", "ignore", "-c", script).stdout


def test_the_slope_of_mish_has_digits_where_it_is_small():
    """TorchScript writes it as a composition, whose parts have none."""
    alike(lambda x: F.mish(x) * 1e3, [tensor([-100.0, -20, -8.5, -1, 0, 1, 20, 1e4])], dynamo=True)


DRAWS = {
    "bernoulli": torch.bernoulli,
    "bernoulli_": lambda p: torch.cat([torch.empty_like(p[:, :1]).bernoulli_(c) for c in (0.0, 1.0, 0.25, 0.5)], 1) + 0 * p,
    "float64": lambda p: torch.bernoulli(p.double()).float(),
    "float16": lambda p: torch.bernoulli(p.half()).float(),
}


@pytest.mark.parametrize("case", DRAWS)
def test_draws_have_their_probability(case, dynamo):
    p = tensor([0.0, 1.0, 0.25, 0.5]).repeat(4000, 1)
    drawn = exporter.load(exporter.export(Calls(DRAWS[case]), (p,), dynamo=dynamo))(p)
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(drawn.mean(0), p[0], rtol=0, atol=0.03)
    assert drawn[:, :2].mean(0).tolist() == [0.0, 1.0]


def test_draws_without_replacement(dynamo):
    weights = tensor([[0.0, 1, 0, 3, 4], [5, 0, 0.5, 0, 1]]).repeat(2000, 1)
    drawn = exporter.load(exporter.export(Calls(lambda p: torch.multinomial(p, 3)), (weights,), dynamo=dynamo))(weights)
    assert drawn[::2].sort().values.unique(dim=0).tolist() == [[1, 3, 4]]
    assert drawn[1::2].sort().values.unique(dim=0).tolist() == [[0, 2, 4]]
    first = drawn[::2, 0].bincount(minlength=5) / 2000
    torch.testing.assert_close(first, weights[0] / 8, rtol=0, atol=0.05)


def test_a_draw_of_one_row_keeps_its_dimension(dynamo):
    weights = tensor([0.0, 1, 0])
    for replacement in (False, True):
        model = Calls(lambda p, replacement=replacement: torch.multinomial(p, 1, replacement))
        assert exporter.load(exporter.export(model, (weights,), dynamo=dynamo))(weights).tolist() == [1]


def test_the_first_export_of_a_process():
    """Torch registers what TorchScript writes with the first export; what replaces it must not come before."""
    script = (
        "import torch, exporter\n"
        "class Adds(torch.nn.Module):\n"
        "    def forward(self, x, u): return x.index_put((torch.tensor([1, 1]),), u, accumulate=True)\n"
        "args = torch.zeros(2), torch.ones(2)\n"
        "print(exporter.load(exporter.export(Adds(), args, dynamo=False))(*args).tolist())"
    )
    assert python("-W", "ignore", "-c", script).stdout.strip().splitlines()[-1] == "[0.0, 2.0]"


def test_torchscript_in_float64():
    alike(lambda x: (torch.log10(x), torch.log2(x), torch.addcmul(x, x, x, value=0.1)), [torch.arange(1.0, 4).double()], dynamo=False)


def test_squeeze_of_several_axes():
    alike(lambda x: (x.squeeze((0, 1)), x[None].squeeze((0, 1)), x[None, :, None].squeeze((0, -2))), [ROWS], dynamo=True)


@pytest.mark.parametrize("case", BOTH)
def test_equals_eager(case, dynamo):
    function, *args = BOTH[case]
    alike(function, args, dynamo)


@pytest.mark.filterwarnings("ignore:.*a check in module")
@pytest.mark.parametrize("case", LOSSES)
def test_losses_equal_eager(case, dynamo):
    function, *args = LOSSES[case]
    alike(function, args, dynamo)


@pytest.mark.parametrize("case", HALVES)
def test_halves_equal_eager(case, dynamo):
    function, *args = HALVES[case]
    alike(function, [x.half() for x in args], dynamo, tolerance=4e-3)


if __name__ == "__main__":
    alike(*(lambda function, *args: (function, args))(*NOTHING[sys.argv[1]]), dynamo=False)
