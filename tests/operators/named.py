"""Inputs at which an exporter was once wrong, or died: operator -> what is special -> (function, its tensors)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import tensor

__all__ = ["CASES"]

Made = tuple[Callable[..., Any], Callable[[], Sequence[torch.Tensor]]]
#: operator, by the name of torch's tests -> kind -> the call.
CASES: dict[str, dict[str, Made]] = {}


def _case(operator: str, kind: str, function: Callable[..., Any], *shapes: Any) -> None:
    """Add a call; a tuple in ``shapes`` stands for random numbers of that shape."""

    def tensors() -> list[torch.Tensor]:
        return [torch.randn(shape) if isinstance(shape, tuple) else shape.clone() for shape in shapes]

    CASES.setdefault(operator, {})[kind] = function, tensors


def _half(t: torch.Tensor) -> torch.Tensor:
    """To float16, but where the reference computes in float64."""
    return t if t.dtype is torch.float64 else t.half()


_EDGES = [-100.0, -20.0, -18.0, 18.0, 20.0, 100.0]
_ROWS = tensor([[0.0, 0.0, 0.0], [1.0, 2.0, -2.0]])

# ------------------------------------------------------------------------------------------ forward, on both exporters

_case("nn_functional_binary_cross_entropy_with_logits", "logits of 18 and more", F.binary_cross_entropy_with_logits, tensor(_EDGES), tensor([0.0, 1.0] * 3))  # fmt: skip
_case("nn_functional_avg_pool2d", "divisor_override", lambda x: F.avg_pool2d(x, 2, divisor_override=3), (1, 2, 4, 4))
_case("atan2", "axes", torch.atan2, tensor([0.0, 0.0, 1.0, -1.0, 2.0]), tensor([-1.0, 1.0, 0.0, 0.0, -3.0]))

# -------------------------------------------------------------------------------------------- forward, on TorchScript

_case("index_add", "the same index twice", lambda x, i, s: x.index_add(0, i, s), (4, 2), tensor([1, 1, 3]), (3, 2))
_case("cdist", "p = 1", lambda x, y: torch.cdist(x, y, p=1.0), (3, 4), (2, 4))
_case("var", "correction = 0.5", lambda x: torch.var(x, dim=0, correction=0.5), (4, 3))
_case("nn_functional_embedding_bag", "max with an empty bag", lambda w, i, o: F.embedding_bag(i, w, o, mode="max"), (5, 3), tensor([0, 2, 4]), tensor([0, 2, 2]))  # fmt: skip
_case("linalg_norm", "keepdim", lambda x: torch.linalg.norm(x, keepdim=True), (2, 3))
_case("nn_functional_adaptive_avg_pool2d", "no batch", lambda x: F.adaptive_avg_pool2d(x, 2), (3, 4, 4))
_case("nn_functional_cosine_similarity", "one dimension", lambda x, y: F.cosine_similarity(x, y, dim=0), (4,), (4,))
_case("mul", "scalar of float64", lambda x: x.double() * 0.1, (3,))

# ------------------------------------------------------------------------------------------------- forward, on dynamo

_case("special_log_ndtr", "far left", torch.special.log_ndtr, tensor([-20.0, -7.0, -1.0, 0.0, 7.0]))

# ------------------------------------------------------------------------------------------------------- the gradient

_case("cdist", "of itself", lambda x: torch.cdist(x, x), (4, 3))
_case("nn_functional_cosine_similarity", "a row of zeros", lambda x, y: F.cosine_similarity(x, y), _ROWS, (2, 3))
_case("norm", "of zeros, p = 3", lambda x: torch.norm(x, p=3, dim=1), _ROWS)
_case("norm_fro", "of zeros", lambda x: torch.norm(x, p="fro"), torch.zeros(2, 3))
_case("nn_functional_binary_cross_entropy", "p of 0 and 1", lambda p: F.binary_cross_entropy(p, tensor([0.0, 1.0, 1.0, 0.0, 0.5]).to(p.dtype)), tensor([0.0, 1.0, 0.0, 1.0, 0.5]))  # fmt: skip
_case("scatter_reduce_prod", "a zero", lambda x, i, s: x.scatter_reduce(0, i, s, "prod"), tensor([1.0, 2.0, 3.0]), tensor([0, 1, 1]), tensor([2.0, 0.0, 5.0]))  # fmt: skip
_case("index_fill", "the same index twice", lambda x, i, v: x.index_fill(0, i, v), (4, 2), tensor([1, 1, 3]), tensor(2.0))
_case("nn_functional_relu6", "bounds of its own", F.relu6, tensor([0.0, 6.0, 3.0]))
_case("clamp", "tensors as bounds, ties", torch.clamp, tensor([1.0, 2.0, 3.0]), tensor([1.0, 0.0, 0.0]), tensor([5.0, 2.0, 1.0]))
_case("xlogy", "0 and 0", torch.xlogy, tensor([0.0, 0.0, 2.0]), tensor([0.0, 2.0, 3.0]))
_case("nn_functional_max_pool2d", "equal values", lambda x: F.max_pool2d(x, 2), torch.tensor([[1.0, 1, 0, 2], [1, 1, 2, 2]]).repeat(2, 1).reshape(1, 1, 4, 4))  # fmt: skip

# --------------------------------------------------------------------------------------------------------------- dies

_case("nn_functional_cross_entropy", "weights of classes", lambda x, t, w: F.cross_entropy(x, t, w), (3, 4), tensor([0, 3, 1]), tensor([1.0, 2.0, 3.0, 4.0]))  # fmt: skip
_case("nn_functional_batch_norm", "statistics as arguments", lambda x, m, v: F.batch_norm(x, m, v), (2, 3, 4), (3,), tensor([1.0, 2.0, 3.0]))  # fmt: skip
_case("nn_functional_batch_norm", "statistics as arguments, training", lambda x, m, v: F.batch_norm(x, m, v, training=True), (2, 3, 4), (3,), tensor([1.0, 2.0, 3.0]))  # fmt: skip
_case("zeros_like", "constant output", torch.zeros_like, (2, 3))
_case("scatter_reduce_sum", "rows", lambda x, i, s: x.scatter_reduce(0, i, s, "sum"), (3, 2), tensor([[0, 1], [0, 2]]), (2, 2))
_case("scatter_reduce_amax", "rows", lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), (3, 2), tensor([[0, 1], [0, 2]]), (2, 2))
_case("tile", "twice", lambda x: torch.tile(x, (2, 3)), (2, 3))
_case("nn_functional_avg_pool2d", "ceil_mode", lambda x: F.avg_pool2d(x, 2, stride=2, ceil_mode=True), (1, 2, 5, 5))
_case("nn_functional_max_pool2d", "ceil_mode", lambda x: F.max_pool2d(x, 2, stride=2, ceil_mode=True), (1, 2, 5, 5))
_case("zeros_like", "an input that nothing reads", lambda x, y: x * 2, (2, 3), (2, 3))
_case("nn_functional_conv2d", "no batch elements", lambda x, w: F.conv2d(x, w), (0, 2, 4, 4), (3, 2, 3, 3))
_case("mm", "no rows", torch.mm, (0, 3), (3, 2))
_case("nn_functional_embedding_bag", "mean", lambda w, i: F.embedding_bag(i, w), (5, 3), tensor([[0, 1], [1, 4]]))
_case("tensor_split", "three", lambda x: torch.tensor_split(x, 3), (5, 2))
_case("nn_functional_cross_entropy", "label_smoothing", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), (3, 4), tensor([0, 3, 1]))  # fmt: skip
_case("nn_functional_huber_loss", "both sides", F.huber_loss, tensor([0.0, 0.5, 3.0]), tensor([0.0, 1.0, -3.0]))
_case("nn_functional_triplet_margin_loss", "rows", F.triplet_margin_loss, (3, 4), (3, 4), (3, 4))
_case("nn_functional_gaussian_nll_loss", "variances", F.gaussian_nll_loss, (3,), (3,), tensor([0.5, 1.0, 2.0]))
_case("nn_functional_scaled_dot_product_attention", "float16, causal", lambda *qkv: F.scaled_dot_product_attention(*map(_half, qkv), is_causal=True), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))  # fmt: skip
