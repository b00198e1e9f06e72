"""What autocast computes in float32 is float32 in the file, whatever stands in for it: one export of all, values and gradients beside eager's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import exporter
from symbolics.quirks import REWRITES
from symbolics.quirks.autocasts import as_autocast_has_it

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

CLASSES = torch.tensor([0, 1, 2, 3])
SIGNS = torch.tensor([[1.0, -1, 1, -1, 1, -1]] * 4)
SHARES = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[0, 1, -1, 2, 3, 4]] * 4)


def _volume(h):
    return h.reshape(1, 1, 2, 3, 4)


#: By the operator's name: calls of a tensor of shape (4, 6) in a half type.
CALLS = {
    "adaptive_avg_pool3d": [lambda h: F.adaptive_avg_pool3d(_volume(h), (1, 3, 2))],
    "adaptive_max_pool3d": [lambda h: F.adaptive_max_pool3d(_volume(h), 1)],
    "avg_pool3d": [lambda h: F.avg_pool3d(_volume(h), 2, divisor_override=3)],
    "binary_cross_entropy": [lambda h: F.binary_cross_entropy(torch.sigmoid(h), SHARES)],
    "binary_cross_entropy_with_logits": [lambda h: F.binary_cross_entropy_with_logits(h * 1000, SHARES, reduction="sum")],
    "cdist": [lambda h: torch.cdist(h * 20, -h)],
    "cosine_embedding_loss": [lambda h: F.cosine_embedding_loss(h, h.flip(1), CLASSES.sign() * 2 - 1)],
    "cross_entropy_loss": [
        lambda h: F.cross_entropy(h * 500, CLASSES, label_smoothing=0.1, reduction="sum"),
        lambda h: F.cross_entropy(h, SHARES),
        lambda h: F.cross_entropy(h, CLASSES),
    ],
    "fake_quantize_per_tensor_affine": [
        lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -128, 127),
        lambda h: torch.fake_quantize_per_tensor_affine(
            h, torch.tensor(0.1), torch.tensor(0, dtype=torch.int32), -128, 127
        ),  # which it leaves alone
    ],
    "hinge_embedding_loss": [lambda h: F.hinge_embedding_loss(h * 500, SIGNS, reduction="sum")],
    "huber_loss": [lambda h: F.huber_loss(h * 500, SHARES, reduction="sum")],
    "l1_loss": [lambda h: F.l1_loss(h * 500, SHARES, reduction="sum")],
    "margin_ranking_loss": [lambda h: F.margin_ranking_loss(h * 500, h.flip(1), SIGNS, reduction="sum")],
    "max_pool3d": [lambda h: F.max_pool3d(_volume(h), 2)],
    "multi_margin_loss": [lambda h: F.multi_margin_loss(h * 500, CLASSES, reduction="sum")],
    "multilabel_margin_loss": [lambda h: F.multilabel_margin_loss(h * 500, LABELS, reduction="sum")],
    "poisson_nll_loss": [lambda h: F.poisson_nll_loss(h / 2, SHARES)],
    "prod": [lambda h: (torch.sigmoid(h) / 100).prod(1), lambda h: torch.prod(h[0])],
    "smooth_l1_loss": [lambda h: F.smooth_l1_loss(h * 500, SHARES, reduction="sum")],
    "soft_margin_loss": [lambda h: F.soft_margin_loss(h, SIGNS, reduction="sum")],
    "trace": [lambda h: (h[:, :4] * 5000).trace()],
    "triplet_margin_loss": [lambda h: F.triplet_margin_loss(h * 500, h.flip(1), h.flip(0) * 2)],
    # those that nothing stands in for
    "kl_div": [lambda h: F.kl_div(h.log_softmax(1), SHARES, reduction="sum")],
    "mse_loss": [lambda h: F.mse_loss(h * 20, SHARES, reduction="sum")],
    "nll_loss": [lambda h: F.nll_loss(h, CLASSES)],
    "reflection_pad1d": [lambda h: F.pad(h[None], (1, 1), mode="reflect")],
    "replication_pad1d": [lambda h: F.pad(h[None], (1, 1), mode="replicate")],
    "grid_sampler": [lambda h: F.grid_sample(h[None, None], torch.full((1, 2, 2, 2), 0.1), align_corners=False)],
}


class Under(nn.Module):
    """Each call on a product of its own, so that the gradient of its weight is that of the call."""

    def __init__(self, calls) -> None:
        super().__init__()
        self.calls = calls
        self.weights = nn.ParameterList(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)) for _ in calls)

    def forward(self, x):
        with torch.autocast("cpu", torch.float16):  # onnxruntime has no products in bfloat16
            return tuple(call(F.linear(x, weight)) for call, weight in zip(self.calls, self.weights))


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_what_autocast_computes_in_float32_is_float32_in_the_file(dynamo):
    names = [name for name, calls in CALLS.items() for _ in calls]
    model = Under([call for calls in CALLS.values() for call in calls])
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    exported = Under(model.calls)
    loaded = exporter.load(exporter.export(exported, (x,), dynamo=dynamo))
    coarse = 2e-3  # the arguments themselves are float16's
    for each in (model, loaded):
        each.found = each(x)
        sum(y.float().sum() for y in each.found).backward()
    gradients = dict(loaded.named_parameters())
    for i, (name, y, expected) in enumerate(zip(names, loaded.found, model.found, strict=True)):
        what, theirs = f"{name} ({i})", model.weights[i].grad
        torch.testing.assert_close(
            y,
            expected,
            rtol=0,
            atol=0.2 if name.startswith("fake") else 2 * coarse * float(expected.detach().abs().max()),
            msg=lambda text, what=what: f"{what}: {text}",
        )
        torch.testing.assert_close(
            gradients[f"weights.{i}"].grad,
            theirs,
            rtol=0,
            atol=4 * coarse * float(theirs.abs().max()) + 1e-6,
            msg=lambda text, what=what: f"{what}: {text}",
        )


def test_every_such_call_that_something_stands_in_for_is_tried():
    """Another rewrite of an operator that autocast casts for has its row above."""
    assert {function.__name__.partition(".")[0] for function in as_autocast_has_it(REWRITES)} <= CALLS.keys()
