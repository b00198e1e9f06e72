"""The public models of the zoo and the standard architectures, verified by both exporters."""

from __future__ import annotations

import warnings

import pytest
import torch

import exporter
from tests.gradients.test_models import MODELS
from tests.models import zoo

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [*zoo.ZOO, *MODELS])
def test_equal_in_a_fresh_process(name, dynamo):
    torch.manual_seed(0)
    if name in zoo.ZOO:
        entry = zoo.ZOO[name]()
        model, args = entry.model, entry.args
    else:
        model, args = MODELS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = exporter.verify(model, args, dynamo=dynamo, steps=1)
    assert report.ok, "\n".join(f"{row.kind} {row.name}: {row.error:.1e} of {row.tolerance:.1e} {row.problem}" for row in report.worst() if not row.ok)
