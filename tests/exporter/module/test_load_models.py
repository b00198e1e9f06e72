"""Real models through load: outputs and every gradient of a training step against eager."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.utils import _pytree as pytree

import exporter
from tests.end_to_end.models import zoo
from tests.exporter.gradient_graph.test_models import MODELS

SLOW = {"gpt2", "bert", "t5", "llama", "vit", "resnet", "lstm", "gru", "unet nearest", "unet bilinear", "ibert"}


def _case(name):
    torch.manual_seed(0)
    if name in zoo.ZOO:
        entry = zoo.ZOO[name]()
        return entry.model, entry.args, entry.allow
    return (*MODELS[name](), ())


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in [*zoo.ZOO, *MODELS]])
def test_a_step_equals_eagers(name, dynamo):
    model, args, allow = _case(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = exporter.load(exporter.export(copy.deepcopy(model), args, dynamo=dynamo), allow=allow)
    module.train()  # eval() of the file's behaviour is not at stake: it was exported as it is
    leaves = []
    for m in (module, model):
        out = [leaf for leaf in pytree.tree_leaves(m(*args)) if isinstance(leaf, torch.Tensor)]
        generator = torch.Generator().manual_seed(1)
        total = sum((leaf * torch.randn(leaf.shape, generator=generator)).sum() for leaf in out if leaf.requires_grad)
        total.backward()
        leaves.append([leaf.detach() for leaf in out])
    for one, two in zip(*leaves, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for (name, one), (other, two) in zip(module.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert (one.grad is None) == (two.grad is None), name
        if two.grad is not None:
            assert float((one.grad - two.grad).abs().max()) < 1e-4 * float(two.grad.abs().max()) + 1e-5 * largest, name
