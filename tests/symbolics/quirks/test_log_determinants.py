"""logdet of matrices whose determinant is no float32: right, or an error that names the way out."""

from __future__ import annotations

import pytest
import torch

import exporter
from exporter import ExportError
from tests.support import Calls

MATRICES = {
    "small numbers": 1e-20 * torch.eye(3) + 1e-21,
    "large numbers": 1e18 * torch.eye(4) + 1e17,
    "of two kinds": torch.stack([1e15 * torch.eye(4) + 1e14, 1e-15 * torch.eye(4) + 1e-16]),
    "units": torch.diag(torch.tensor([1.0, 1e-15, 1e-15, 1e-15])) + 1e-17,
    "eight rows": 0.1 * torch.eye(8) + 0.01,
    "one row": torch.tensor([[2.0]]),
    "below 0": -torch.eye(3),
    "float64": 1e-100 * torch.eye(4, dtype=torch.float64) + 1e-101,
}


def both(function, x):
    x = x.clone().requires_grad_()
    value = function(x)
    return value.detach(), torch.autograd.grad(value.sum(), x)[0]


@pytest.mark.parametrize("name", MATRICES)
def test_small_matrices(name, dynamo):
    x = MATRICES[name]
    module = exporter.load(exporter.export(Calls(lambda x: x.logdet()), (x,), dynamo=dynamo))
    (found, slope), (wanted, its) = both(module, x), both(torch.logdet, x.double())
    torch.testing.assert_close(found, wanted.to(x.dtype), rtol=1e-6, atol=1e-6, equal_nan=True)
    if not wanted.isnan().any():
        scale = its.abs().amax((-2, -1), keepdim=True)
        torch.testing.assert_close(slope.double() / scale, its / scale, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "shapes", "what"), [(60, None, "of 60 rows"), (3, {0: "n", 1: "n"}, "of matrices of an open size")], ids=["large", "open"]
)
def test_others_are_refused_or_kept(dynamo, size, shapes, what):
    x = 0.1 * torch.eye(size) + 0.01

    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.logdet(x)

    model, options = Model(), {"dynamo": dynamo, "dynamic_shapes": None if shapes is None else (shapes,)}
    with pytest.raises(ExportError, match=rf'(?s){what}.*opaque=\["aten::logdet"\], or opaque="missing"'):
        exporter.export(model, (x,), **options)
    for opaque in ("missing", ["aten::logdet"]):
        module = exporter.load(exporter.export(model, (x,), opaque=opaque, **options), allow=["aten::logdet"])
        for found, wanted in zip(both(module, x), both(torch.logdet, x), strict=True):
            torch.testing.assert_close(found, wanted)


def test_an_open_batch_of_small_ones(dynamo):
    class Model(torch.nn.Module):
        def forward(self, x):
            return torch.logdet(x)

    x = torch.rand(5, 3, 3) * 1e-15
    module = exporter.load(exporter.export(Model(), (x,), dynamo=dynamo, dynamic_shapes=({0: "batch"},)))
    x = torch.stack([torch.eye(3) * 1e-17] * 7)
    torch.testing.assert_close(module(x), torch.logdet(x))


def test_an_open_batch_that_is_as_long_as_the_matrix(dynamo):
    x = torch.eye(3) * 1e-15 + torch.rand(3, 3, 3) * 1e-16
    module = exporter.load(
        exporter.export(Calls(lambda x: x.logdet()), (x,), dynamo=dynamo, dynamic_shapes=(({0: torch.export.Dim("batch")},),))
    )
    x = torch.stack([torch.eye(3) * 1e-17] * 5)
    torch.testing.assert_close(module(x), torch.logdet(x))


def test_fallback_keeps_the_operator_alone(dynamo):
    """Not the whole model."""
    program = exporter.export(Calls(lambda x: x.logdet() * 2), (torch.eye(60) * 0.1,), dynamo=dynamo, fallback=True)
    assert program.fallback == 'opaque="missing"'
