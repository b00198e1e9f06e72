"""Real models through load: outputs and every gradient of a training step against eager."""

from __future__ import annotations

import copy
import warnings

import torch
from torch.utils import _pytree as pytree

import exporter
from tests.zoo.exported import exported, models


@models()
def test_a_step_equals_eagers(name, dynamo):
    found = exported(name, dynamo)
    model, args = copy.deepcopy(found.entry.model), found.entry.args
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = exporter.load(found.program, allow=found.entry.allow)
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
