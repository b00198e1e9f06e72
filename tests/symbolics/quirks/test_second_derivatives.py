"""What eager differentiates smoothly and a formula may write by absolute values, maxima and choices: two derivatives at ties and at zeros."""

from __future__ import annotations

import pytest
import torch
from torch import tensor
from torch.nn import functional as F

import exporter
from tests.support import Calls

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

X = tensor([0.0, 1e-9, -1e-9, 0.5, -0.5, 1, -1, 2, -3], dtype=torch.float64)
Y = tensor([0.0, 0, 0, 0.5, -0.5, -1, 1, 2, -3 + 1e-9], dtype=torch.float64)  # the first, and some others, are equal
T = tensor([0.0, 1, 0.5, 0, 1, 0.5, 1, 0, 1], dtype=torch.float64)
ROWS = torch.stack([X[:3] + 1, X[3:6], X[6:]])
LABELS, ONES = tensor([0, 1, 2]), torch.ones(3, 3, dtype=torch.float64)

CASES = {
    "logaddexp": (torch.logaddexp, X, Y),
    "logaddexp2": (torch.logaddexp2, X, Y),
    "softplus, as logaddexp": (lambda x: torch.logaddexp(x, torch.zeros_like(x)), X),
    "log cosh, as logaddexp": (lambda x: torch.logaddexp(x, -x), X),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x, 0), torch.cat([X[:1], X])),
    "logsumexp": (lambda x: torch.logsumexp(torch.stack([x, x, -x]), 0), X),
    "log_softmax": (lambda x: F.log_softmax(x, 0), X),
    "huber_loss": (lambda x, y: F.huber_loss(x, y, reduction="none", delta=0.75), X, Y),
    "smooth_l1_loss": (lambda x, y: F.smooth_l1_loss(x, y, beta=0.75), X, Y),
    "bce with logits": (F.binary_cross_entropy_with_logits, X.float(), T.float()),
    "bce with logits, weighted": (lambda x, t: F.binary_cross_entropy_with_logits(x, t, pos_weight=torch.full_like(x, 3.0)), X.float(), T.float()),
    "soft_margin_loss": (lambda x: F.soft_margin_loss(x, torch.ones_like(x)), X),
    "multilabel_soft_margin_loss": (lambda x: F.multilabel_soft_margin_loss(x, ONES.float()), ROWS.float()),
    "cross_entropy, smooth": (lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1), ROWS),
    "cosine_embedding_loss": (lambda a, b: F.cosine_embedding_loss(a, b, ONES[0]), ROWS, ROWS.clone()),
    "gaussian_nll_loss": (lambda x, v: F.gaussian_nll_loss(x, torch.zeros_like(x), v), X, X.abs() + 1),
    "xlogy": (torch.xlogy, X, X.abs() + 1),
    "xlog1py": (torch.special.xlog1py, X, Y / 4),
    "entr": (torch.special.entr, X.abs() + 0.5),
    "log1p": (torch.log1p, X / 4),
    "expm1": (torch.expm1, X),
    "sinc": (torch.sinc, X[3:]),
    "logit": (lambda x: torch.logit(torch.sigmoid(x)), X),
    "logsigmoid": (F.logsigmoid, X.float()),
    "softplus": (F.softplus, X.float()),
    "mish": (F.mish, X.float()),
    "erfc": (torch.erfc, X.float()),
    "silu": (F.silu, X),
    "vector_norm, p=4": (lambda x: torch.linalg.vector_norm(x, 4), X),
    "square of a norm": (lambda x: x.norm() ** 2, X),
    "atan2": (torch.atan2, X.float(), Y.float() + 4),
    "power": (lambda x: x**3, X),
}  # fmt: skip


def derivatives(function, tensors):
    """The value, its slopes, and the second derivatives of it along a direction, of a sum with weights."""
    tensors = [each.clone().requires_grad_() for each in tensors]

    def along(value):
        return (value * torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).reshape(value.shape)).sum()

    value = function(*tensors)
    slopes = torch.autograd.grad(along(value), tensors, create_graph=True, materialize_grads=True)
    curved = sum(along(slope) * factor for factor, slope in enumerate(slopes, 1))  # of x and y apart: f(x - y) is flat along both together
    return [value, *slopes, *torch.autograd.grad(curved, tensors, materialize_grads=True)]


@pytest.mark.parametrize("name", CASES)
def test_of_a_file_are_those_of_eager(name, dynamo):
    function, *tensors = CASES[name]
    module = exporter.load(exporter.export(Calls(function), tuple(tensors), dynamo=dynamo))
    rtol = 1e-8 if tensors[0].dtype is torch.float64 else 2e-5
    for found, wanted in zip(derivatives(module, tensors), derivatives(function, tensors), strict=True):
        torch.testing.assert_close(found.detach(), wanted.detach(), rtol=rtol, atol=rtol)


def test_sums_of_what_is_infinite(dynamo):
    x, y = tensor([torch.inf, torch.inf, -torch.inf, -torch.inf, 1]), tensor([torch.inf, 1, -torch.inf, 1, -torch.inf])
    for sum_ in (torch.logaddexp, torch.logaddexp2):
        module = exporter.load(exporter.export(Calls(sum_), (x, y), dynamo=dynamo))
        value, *slopes = derivatives(module, (x, y))[:3]
        torch.testing.assert_close(value, sum_(x, y))
        slopes = [slope / torch.linspace(0.5, 1.5, 5) for slope in slopes]
        torch.testing.assert_close(slopes, [tensor([0.5, 1, 0.5, 0, 1]), tensor([0.5, 0, 0.5, 1, 0])])
