"""Solvers whose gradient is an adjoint method of their own, by `opaque=`: a training step and a loaded module move as eager does."""

from __future__ import annotations

import pytest
import torch

from tests.trains import assert_three_train_alike
from tests.zoo import modules as M

FUNCTIONS = ["tests.zoo.modules:solve", "tests.zoo.modules:blend"]


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_an_adjoint_that_takes_a_module_and_a_loop_around_it(dynamo):
    torch.manual_seed(0)
    assert_three_train_alike(
        M.Solves(),
        torch.randn(6, 4),
        torch.randn(6, 4),
        torch.optim.AdamW,
        1e-3,
        steps=3,
        rtol=1e-4,
        allow=FUNCTIONS,
        dynamo=dynamo,
        opaque=FUNCTIONS,
    )
