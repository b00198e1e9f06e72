"""Functions of torch.jit.script in a model: packages for graphs and atoms script their sums over edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import exporter
from tests.support import Calls, nodes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@torch.jit.script
def added(x: torch.Tensor, index: torch.Tensor, size: int, dim: int = 0) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return torch.zeros(shape, dtype=x.dtype).index_add(dim, index, x)


@torch.jit.script
def twice(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return added(added(x, index, x.size(0)), index, x.size(0))


@torch.jit.script
def branched(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 0):
        return x * 2
    return x - 1


def forces(p, index):
    p.requires_grad_(True)
    energy = twice(p.tanh(), index).square().sum()
    (slope,) = torch.autograd.grad(energy, p, create_graph=True)
    return energy, -slope


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("function", [lambda x, index: twice(x * 2, index), lambda x, index: added(x[:, 0], index, x.shape[0]), forces])
def test_a_scripted_sum_over_edges(function, dynamo):
    n = torch.export.Dim("n", min=2)
    given = torch.randn(5, 3), torch.tensor([0, 1, 1, 4, 0])
    program = exporter.export(Calls(function), given, dynamo=dynamo, dynamic_shapes=(({0: n}, {0: n}),), input_names=["x", "index"])
    session = exporter.inference_session(program.model_proto)
    for count in (5, 9):
        x, index = torch.randn(count, 3), torch.randint(count, (count,))
        found = session.run(None, {"x": x.numpy(), "index": index.numpy()})
        expected = function(x, index)
        for ours, eager in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
            np.testing.assert_allclose(ours, eager.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_a_branch_in_a_scripted_function_stays_one():
    program = exporter.export(Calls(branched), (torch.ones(3),), dynamo=False, input_names=["x"])
    assert nodes(program.model, "If")
    session = exporter.inference_session(program.model_proto)
    for x in (torch.ones(3), -torch.ones(3)):
        np.testing.assert_array_equal(session.run(None, {"x": x.numpy()})[0], branched(x).numpy())


def test_scripts_are_scripts_again_afterwards():
    before = torch.jit.ScriptFunction.__call__
    with pytest.raises(Exception, match="fails"):
        exporter.export(Calls(_fails), (torch.ones(3),), dynamo=False)
    assert torch.jit.ScriptFunction.__call__ is before


def _fails(x):
    raise LookupError("fails")
